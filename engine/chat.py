"""Chat templates, rendered once per kind of conversation and cut where the contents stand."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvblend.engine.config import UnsupportedModel

ChatRole = Literal["user", "assistant"]
SYSTEM = -1
_JOINT = -2
REFERENCE_DATE = datetime.date(2024, 7, 26)
_JOINT_TEXT = "\n\n"
_LAYOUTS_MAX = 256


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a content stands: `index` is the turn's, or `SYSTEM` for the system prompt."""

    index: int
    content: str


class ChatTemplate:
    """A model's chat template (Jinja), as pieces of its own text with holes for the contents.

    It is rendered with placeholders, never with what a user wrote, so a content cannot steer it and stands in the
    prompt as written even where the template would have stripped it. A template that refuses or drops a system prompt
    gets it at the start of the first user message, followed by an empty line. Without a template (`source` None) a
    conversation is the system prompt, an empty line, and every content followed by a line break.

    A template that asks for the date gets `today`, a fixed one unless set: a moving date would change what every stored
    chunk was computed behind. UnsupportedModel says why a template cannot be used.
    """

    def __init__(self, source: str | None, bos: str = "", eos: str = "", today: datetime.date = REFERENCE_DATE) -> None:
        self._variables = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}
        self._template: jinja2.Template | None = None
        self._layouts: dict[tuple[bool, tuple[ChatRole, ...]], list[str | int]] = {}
        if source is None:
            return
        # placeholders are made of characters that no template treats specially and no other text of it holds
        used = set(source + bos + eos)
        self._open, self._close = [c for c in map(chr, range(0xE000, 0xF8FF)) if c not in used][:2]
        try:
            self._template = _environment(today).from_string(source)
        except jinja2.TemplateError as error:
            raise UnsupportedModel(f"the chat template cannot be read: {error}") from None

    def split(self, system: str | None, turns: Sequence[tuple[ChatRole, str]]) -> list[str | Hole]:
        """The conversation as template text and holes, in prompt order, ending where the model's answer begins.

        `system` None leaves the system prompt to the template, which may bring its own. ValueError where the template
        refuses the order of roles.
        """
        if not turns or turns[0][0] != "user":
            raise ValueError("messages must begin with a user message")
        key = (system is not None, tuple(role for role, _ in turns))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._lay_out(*key)
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            self._layouts[key] = layout
        pieces: list[str | Hole] = []
        for piece in layout:
            if isinstance(piece, str):
                pieces.append(piece)
            elif piece == SYSTEM:
                pieces.append(Hole(SYSTEM, system or ""))
            elif piece != _JOINT:
                pieces.append(Hole(piece, turns[piece][1]))
            elif system:
                # an empty system prompt without a place of its own needs no line to part it
                pieces.append(_JOINT_TEXT)
        return pieces

    def _lay_out(self, has_system: bool, roles: tuple[ChatRole, ...]) -> list[str | int]:
        if self._template is None:
            head: list[str | int] = [SYSTEM, _JOINT] if has_system else []
            return head + [piece for index in range(len(roles)) for piece in (index, "\n")]
        refused = ""
        if has_system:
            try:
                return self._cut(self._render(True, roles), [SYSTEM, *range(len(roles))])
            except (ValueError, UnsupportedModel) as error:
                refused = f" (with a system message: {error})"
        try:
            pieces = self._cut(self._render(False, roles), list(range(len(roles))))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error}{refused}") from None
        if has_system:
            at = pieces.index(0)
            pieces[at:at] = [SYSTEM, _JOINT]
        return pieces

    def _placeholder(self, index: int) -> str:
        return f"{self._open}{index + 1}{self._close}"

    def _render(self, has_system: bool, roles: tuple[ChatRole, ...]) -> str:
        messages = [{"role": role, "content": self._placeholder(i)} for i, role in enumerate(roles)]
        if has_system:
            messages.insert(0, {"role": "system", "content": self._placeholder(SYSTEM)})
        if self._template is None:
            return ""
        try:
            return self._template.render(messages=messages, **self._variables)
        except _Refused as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from None
        except Exception as error:  # a template is somebody's program: it can fail in any way
            raise UnsupportedModel(f"the chat template fails: {type(error).__name__}: {error}") from None

    def _cut(self, text: str, indexes: list[int]) -> list[str | int]:
        """`text` cut at its placeholders; each of `indexes` must occur exactly once."""
        parts = re.split(f"{self._open}([0-9]+){self._close}", text)
        found = parts[1::2]
        torn = any(mark in part for part in parts for mark in (self._open, self._close))
        if torn or sorted(found) != sorted(str(i + 1) for i in indexes):
            names = ["the system prompt" if i == SYSTEM else f"message {i}" for i in indexes]
            counts = [found.count(str(i + 1)) for i in indexes]
            wrong = [f"{name} {count} times" for name, count in zip(names, counts, strict=True) if count != 1]
            raise UnsupportedModel(
                f"the chat template does not write every content exactly once: {', '.join(wrong) or 'it alters them'}"
            )
        pieces: list[str | int] = []
        for number, part in enumerate(parts):
            if number % 2:
                pieces.append(int(part) - 1)
            elif part:
                pieces.append(part)
        return pieces


class _Refused(jinja2.TemplateError):
    """Raised by a template itself."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(today: datetime.date) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _date_format(today)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # the built-in filter escapes for HTML, which templates of models do not expect
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _date_format(today: datetime.date) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        return today.strftime(form)

    return strftime_now
