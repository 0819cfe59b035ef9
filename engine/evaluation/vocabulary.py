"""The words of the probes: made-up things with catalogue numbers, facts about them, and filler without digits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of thing. `prefix` begins its catalogue numbers; `low..high` are the values of its quantity in `unit`.

    `aliases` state that `{code}` is called `{alias}`, `values` that `{name}` has `{value}`; `ask` follows "What is" or
    "is the larger" in a question.
    """

    noun: str
    prefix: str
    unit: str
    low: int
    high: int
    ask: str
    aliases: tuple[str, ...]
    values: tuple[str, ...]


_CALLED = (
    "The {noun} catalogued as {code} is known to everybody here as the {alias}.",
    "In the register {code} stands for a {noun} that the crews call the {alias}.",
    "What the labels list as {noun} {code} goes by the name of the {alias}.",
    "Since the last inventory the {noun} numbered {code} has carried the name {alias}.",
    "Visitors who ask for {code} are led to a {noun} with the painted name {alias}.",
    "A brass plate on the {noun} called the {alias} bears the number {code}.",
)

DOMAINS: tuple[Domain, ...] = (
    Domain(
        "barometer",
        "BR",
        "millibars",
        910,
        1080,
        "the reading",
        _CALLED,
        (
            "At the evening round the {name} showed a reading of {value} millibars.",
            "The reading of the {name} was entered as {value} millibars and signed twice.",
            "After the repair the {name} settled at {value} millibars, which was taken as its reading.",
        ),
    ),
    Domain(
        "telescope",
        "TL",
        "centimetres",
        110,
        890,
        "the focal length",
        _CALLED,
        (
            "The focal length of the {name} was measured again and found to be {value} centimetres.",
            "With its new mirror the {name} has a focal length of {value} centimetres.",
            "The workshop notes give {value} centimetres as the focal length of the {name}.",
        ),
    ),
    Domain(
        "cargo ship",
        "VS",
        "tonnes",
        210,
        980,
        "the cargo",
        _CALLED,
        (
            "On its last voyage the {name} carried a cargo of {value} tonnes.",
            "The harbour office wrote down {value} tonnes as the cargo of the {name}.",
            "Loaded to the line, the {name} takes a cargo of {value} tonnes.",
        ),
    ),
    Domain(
        "water pump",
        "PM",
        "litres",
        120,
        870,
        "the hourly flow",
        _CALLED,
        (
            "In the test the {name} moved {value} litres an hour, its best hourly flow so far.",
            "The hourly flow of the {name} was set to {value} litres by the night shift.",
            "A sheet on the wall gives the {name} an hourly flow of {value} litres.",
        ),
    ),
    Domain(
        "bell",
        "BL",
        "kilograms",
        130,
        960,
        "the weight",
        _CALLED,
        (
            "When it was lowered for cleaning, the {name} had a weight of {value} kilograms.",
            "The founders' bill puts the weight of the {name} at {value} kilograms.",
            "On the yard scale the {name} showed a weight of {value} kilograms.",
        ),
    ),
    Domain(
        "kiln",
        "KN",
        "degrees",
        610,
        990,
        "the firing temperature",
        _CALLED,
        (
            "The firing temperature of the {name} is kept at {value} degrees.",
            "For the grey glaze the {name} is run at {value} degrees, its usual firing temperature.",
            "Two probes agreed that the {name} reached a firing temperature of {value} degrees.",
        ),
    ),
    Domain(
        "seed sample",
        "SD",
        "grains",
        140,
        940,
        "the grain count",
        _CALLED,
        (
            "Under the glass the {name} gave a grain count of {value} grains.",
            "The grain count of the {name} was corrected to {value} grains.",
            "Sorted by hand, the {name} came to a grain count of {value} grains.",
        ),
    ),
    Domain(
        "beacon",
        "BC",
        "candles",
        150,
        970,
        "the brightness",
        _CALLED,
        (
            "From the pier the {name} was rated at a brightness of {value} candles.",
            "With a fresh lens the {name} gives a brightness of {value} candles.",
            "The keeper's book states {value} candles as the brightness of the {name}.",
        ),
    ),
)

ALIAS_COLOURS = (
    "Amber", "Ashen", "Azure", "Bright", "Bronze", "Cobalt", "Copper", "Coral", "Crimson", "Dusky", "Emerald",
    "Gilded", "Grey", "Hollow", "Indigo", "Iron", "Ivory", "Jade", "Lonely", "Mossy", "Narrow", "Northern", "Ochre",
    "Olive", "Pale", "Patient", "Quiet", "Russet", "Sable", "Scarlet", "Silent", "Silver", "Slate", "Stormy", "Sunken",
    "Tawny", "Umber", "Violet", "Wandering",
)  # fmt: skip
ALIAS_THINGS = (
    "Acorn", "Anchor", "Anvil", "Badger", "Beetle", "Bittern", "Cedar", "Compass", "Cormorant", "Cricket", "Curlew",
    "Falcon", "Fern", "Gannet", "Hare", "Harrow", "Heron", "Kestrel", "Lantern", "Lark", "Magpie", "Marten", "Newt",
    "Otter", "Petrel", "Pilgrim", "Plover", "Raven", "Sandpiper", "Sparrow", "Stork", "Swift", "Tern", "Thistle",
    "Trout", "Walnut", "Weasel", "Willow", "Wren", "Yarrow",
)  # fmt: skip

PLACES = (
    "Arnholt", "Birkmoor", "Brackwell", "Calder Sound", "Corrimere", "Dunmarsh", "Eastfallow", "Elderwick", "Fenbridge",
    "Garrowby", "Hallowmere", "Harlscar", "Inchvale", "Kelderby", "Lowmarch", "Marrowby", "Netherfirth", "Oakhaven",
    "Penmorrow", "Quarrendale", "Ravenscar Point", "Saltmoor", "Skerrivale", "Thornholm", "Ullerby", "Varley Cross",
    "Westering", "Windle Bay", "Wyrmouth", "Yarrowdale",
)  # fmt: skip
PLACE_KINDS = ("station", "depot", "observatory", "works", "harbour", "archive", "survey post", "yard")
REPORTS = (
    "quarterly report", "inspection notes", "register", "log of the night watch", "letter to the trustees",
    "inventory", "maintenance diary", "annual summary", "minutes", "visitor guide",
)  # fmt: skip

FILLER_SLOTS: dict[str, tuple[str, ...]] = {
    "season": ("spring", "summer", "autumn", "winter", "the thaw", "the dry months", "the long frost"),
    "room": ("the east wing", "the old boiler house", "the upper gallery", "the store room", "the drying loft",
             "the reading room", "the lower shed", "the tool cellar"),
    "crew": ("the night shift", "the survey crew", "the apprentices", "the clerks", "two carpenters", "the gardeners",
             "the harbour crew", "the cleaning party"),
    "goods": ("rope", "lamp oil", "slate", "timber", "tinned fish", "coal", "paper", "wool", "salt", "copper wire"),
    "trouble": ("a leaking gutter", "a jammed door", "a broken window", "rust on the hinges", "damp in the walls",
                "mice in the pantry", "a loose railing", "a cracked step"),
    "weather": ("fog", "sleet", "a dry wind", "heavy rain", "early snow", "a week of haze", "a hard frost"),
    "many": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "a dozen"),
    "way": ("the coast road", "the mule track", "the canal path", "the ridge lane", "the causeway", "the ferry slip"),
    "thing": ("a ledger", "a wooden crate", "a set of keys", "a spare lens", "a roll of charts", "a tin of varnish",
              "an iron stove", "a folding table"),
}  # fmt: skip

FILLER = (
    "In {season} the staff moved the benches out of {room} so that the floor could be scrubbed and oiled.",
    "A delivery of {goods} arrived by {way} and had to wait at the gate until somebody signed for it.",
    "The inspectors complained about {trouble}, though nobody could say how long it had been there.",
    "Because of {weather} the lamps were lit early and {crew} stayed indoors for most of the day.",
    "{crew} found {thing} behind the panelling, wrapped in sacking and quite undamaged.",
    "The committee met {many} times before it agreed on the colour of the shutters.",
    "Children from the village are let in on market days, and most of them ask about {room}.",
    "For the repair of {way} the council promised {goods}, but none of it has been seen so far.",
    "The kitchen is heated with {goods} since the old supply ran out in {season}.",
    "An argument about {trouble} filled {many} pages of the complaints book and was never settled.",
    "When {weather} set in, {crew} covered the windows of {room} with boards and canvas.",
    "It takes {many} people to carry {thing} up the stairs, and the stairs are not to be trusted.",
    "The path to {room} was gravelled again after {season}, which the older staff thought a waste.",
    "Nobody remembers who ordered so much {goods}; it now fills a corner of {room}.",
    "A notice at the door asks visitors to wipe their shoes and to keep their dogs away from {room}.",
    "{crew} asked for warmer coats and were given {thing} instead, which caused some laughter.",
    "During {season} the post came along {way} only once a week, and newspapers were shared.",
    "The garden behind {room} produced more beans than anyone could eat, so they were given away.",
    "Painting was put off because of {weather}, and the scaffolding stood empty for {many} weeks.",
    "Someone left {thing} on the windowsill, where it gathered dust until the next cleaning.",
    "The telephone line follows {way} and fails at the first sign of {weather}.",
    "An old photograph shows {crew} in front of {room}, all of them squinting into the sun.",
    "The roof was mended with {goods} that had been meant for another building altogether.",
    "On quiet evenings {crew} play cards in {room} and leave the door open for the cat.",
    "The annual fair had to be moved to {room} on account of {weather}, and it was crowded.",
    "A carpenter was paid for {many} days of work on {trouble}, and the bill is still disputed.",
    "The catalogue of the library was copied out by hand in {season}, a task that took {many} months.",
    "Deliveries of {goods} are counted at the gate and once more when they reach {room}.",
    "The clock in {room} runs slow, and {crew} set it right by the sound of the ferry.",
    "Last year there was talk of closing {way}, but a petition put an end to the plan.",
    "To keep out {weather}, felt was nailed to the frames and the gaps were filled with {goods}.",
    "The new timetable was pinned up beside {thing}, where hardly anybody noticed it.",
    "A small exhibition about {goods} was opened in {room} with tea, speeches and a brass band.",
    "{crew} swept the yard, stacked the {goods} and went home before it grew dark.",
)
