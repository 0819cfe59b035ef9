"""Conversations from outside: roles, contents as text or in parts, and the documents that stand in them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

from kvblend.actors.messages import ChatMessage, Document, Role
from kvblend.api.server.fields import Fields, check_text, invalid, show
from kvblend.api.server.limits import ApiLimits

ROLES = ("user", "assistant", "system", "developer")
PART_TYPES = ("text", "input_text", "output_text")
JOINT = "\n\n"
# what a message of an earlier answer carries along, and a name; none of it changes what is said
_BESIDE = ("type", "id", "status", "phase", "name", "refusal", "annotations", "audio", "function_call", "tool_calls")
_IGNORED = ("id", "status", "phase", "name")
_PART_FIELDS = ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint")


@dataclass(slots=True)
class Turns:
    """A conversation: the system prompt if it brings one, the turns behind it, the documents of its first question.

    `places` pairs the engine's paths (`messages[0].content`, counted without the system prompt) with the sender's.
    """

    system: str | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)


def parse_turns(
    items: list[object], name: str, limits: ApiLimits, documents_before: int = 0, messages_before: int = 0
) -> Turns:
    """Read the messages of the field `name`. RequestError names the path.

    All text parts of the first user message but the last are documents, numbered behind `documents_before` others; in
    any other message parts are joined with an empty line between. System messages may only stand first. These turns
    follow `messages_before` others, so that with any the first user message is not among them.
    """
    turns = Turns()
    for index, item in enumerate(items):
        path = f"{name}[{index}]"
        one = Fields(item, path, ("role", "content", *_BESIDE))
        one.choice("type", ("message",))
        _refuse_beside(one)
        role = one.choice("role", ROLES)
        if role is None:
            raise invalid(one.path("role"), "is missing")
        blank = role in ("system", "developer")
        parts = _parse_content(one, limits, blank=blank)
        if blank:
            if turns.messages:
                raise invalid(one.path("role"), f"is {role}; such a message may only stand first")
            own = JOINT.join(text for _, text in parts)
            turns.system = own if turns.system is None else f"{turns.system}{JOINT}{own}"
            continue
        turns.places.append((f"messages[{messages_before + len(turns.messages)}]", path))
        if role == "user" and not turns.messages and not messages_before:
            for where, text in parts[:-1]:
                turns.places.append((f"documents[{documents_before + len(turns.documents)}]", where))
                turns.documents.append(Document(text=text))
            parts = parts[-1:]
        turns.messages.append(ChatMessage(cast(Role, role), JOINT.join(text for _, text in parts)))
    return turns


def check_question(turns: Turns, name: str) -> None:
    """RequestError unless there is a last turn and it is a user's."""
    if not turns.messages:
        raise invalid(name, "is empty: ask something")
    if turns.messages[-1].role != "user":
        raise invalid(name, "must end with a user message")


def _parse_content(one: Fields, limits: ApiLimits, *, blank: bool) -> list[tuple[str, str]]:
    """The texts of a message with their paths: one, or one for each part that is not blank."""
    value, path = one.raw("content"), one.path("content")
    if value is None:
        raise invalid(path, "is missing")
    if isinstance(value, str):
        return [(path, check_text(value, path, blank=blank))]
    if not isinstance(value, list):
        raise invalid(path, f"must be a string or a list of text parts, not {show(value)}")
    texts: list[tuple[str, str]] = []
    for number, item in enumerate(one.array("content", limits.items_max) or ()):
        part = Fields(item, f"{path}[{number}]", _PART_FIELDS)
        kind = part.choice("type", PART_TYPES)
        text = part.text("text", blank=True)
        if kind is None or text is None:
            raise invalid(part.path("type" if kind is None else "text"), "is missing; a part is {type, text}")
        if text.strip():
            texts.append((part.path("text"), text))
    if not texts and not blank:
        raise invalid(path, "is empty")
    return texts


def _refuse_beside(one: Fields) -> None:
    for name in _BESIDE:
        if name != "type" and name not in _IGNORED and one.raw(name) not in (None, []):
            raise invalid(one.path(name), "is not supported here; messages are text")


def neutral(fields: Fields, allowed: dict[str, tuple[object, ...]]) -> None:
    """Refuse fields of OpenAI's that nothing here does, unless they hold one of the values that ask for nothing."""
    for name, values in allowed.items():
        value = fields.raw(name)
        if value is None or any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in values):
            continue
        known = f"; leave it out or give {_names(values)}" if values else "; leave it out"
        raise invalid(fields.path(name), f"is {show(value)}, which is not supported here{known}")


def _names(values: Collection[object]) -> str:
    return " or ".join(show(value) for value in values)
