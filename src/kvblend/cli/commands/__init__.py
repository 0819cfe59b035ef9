"""The commands, one file each: flags and help here, the work in the module of the same name beside this folder."""
