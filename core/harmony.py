"""Messages of OpenAI's Harmony format (gpt-oss, 2025), for its tool and reasoning parsers.

An output is a sequence of messages. Each has a header with a channel and possibly a recipient, then its text:

    <|channel|>analysis<|message|>They ask for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place": "Oslo"}<|call|>

The prompt has the <|start|>assistant of the first message. The recipient may also be part of the role
(<|start|>assistant to=functions.weather<|channel|>...).
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.parsing import Malformed, Steps, TextStream

OPEN = "<|"
"""Beginning of every mark."""
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
SPECIAL = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
CHANNELS = ("analysis", "commentary", "final")
TYPES = ("json", "code")
"""Words that may state the type of a message's text; code by models that leave <|constrain|> out."""
LONGEST_LABEL = 160
"""Maximum number of characters between two marks of a header."""
TO = "to="


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message."""

    channel: str
    recipient: str = ""
    """Empty = the user."""


def read_header(stream: TextStream) -> Steps[Header]:
    """Parse a header whose OPEN is consumed, up to and including <|message|>. Raises Malformed."""
    recipient = ""
    if (yield from stream.accept(START.removeprefix(OPEN))):
        role, recipient = _split((yield from _label(stream)))
        if role != ["assistant"]:
            raise Malformed
        yield from stream.expect(CHANNEL)
    else:
        yield from stream.expect(CHANNEL.removeprefix(OPEN))
    words, to = _split((yield from _label(stream)))
    if (yield from stream.accept(CONSTRAIN)):
        words.append((yield from _label(stream)).strip())
    yield from stream.expect(MESSAGE)
    if not words or words[0] not in CHANNELS or (words[1:] and words[1:] not in ([one] for one in TYPES)):
        raise Malformed
    if to and recipient and to != recipient:
        raise Malformed
    return Header(words[0], to or recipient)


def _label(stream: TextStream) -> Steps[str]:
    """Consume text up to the next mark."""
    found = ""
    while (char := (yield from stream.peek())) and char != "<":
        found += char
        stream.at += 1
        if len(found) > LONGEST_LABEL:
            raise Malformed
    return found


def _split(label: str) -> tuple[list[str], str]:
    """Return the words of a label, and the recipient among them."""
    words = label.split()
    recipients = [word.removeprefix(TO) for word in words if word.startswith(TO)]
    if len(recipients) > 1:
        raise Malformed
    return [word for word in words if not word.startswith(TO)], "".join(recipients)
