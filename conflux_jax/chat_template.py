"""Chat templates: the Jinja program that a model ships to lay a conversation out as text.

A template is code from whoever published the model, so it runs in Jinja's sandbox. The environment
is the one that transformers documents for template authors: the same whitespace rules, filters and
functions. https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from conflux_jax.request import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELD = "messages"


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that it may use, `bos_token` say.

    `source` None is a model without a template: it renders nothing but a clear InvalidRequest.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]):
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        self._problem = "the model has no chat template"
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                self._problem = f"the model's chat template does not compile: {error}"

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
        """The conversation as the model expects it, ending, with `add_generation_prompt`, where
        the assistant's answer starts.

        `messages` come from outside and are checked here: objects with a `role` of ROLES and a
        text `content`. Raises InvalidRequest (field "messages") where they are something else or
        where the template refuses them, two user turns in a row for instance.
        """
        if self._template is None:
            raise InvalidRequest(FIELD, self._problem)
        checked = _checked(messages)
        try:
            return self._template.render(
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _Refusal as error:
            raise InvalidRequest(FIELD, f"the model's chat template says: {error}") from error
        except Exception as error:  # the template is a program: it may raise whatever Python can
            raise InvalidRequest(
                FIELD, f"the model's chat template fails: {type(error).__name__}: {error}"
            ) from error


class _Refusal(Exception):
    """What a template raises by `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _checked(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(FIELD, f"must be a list, got {type(messages).__name__}")
    if not messages:
        raise InvalidRequest(FIELD, "must have at least one message, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise InvalidRequest(FIELD, f"message {index} must be an object, got {kind}")
        if message.get("role") not in ROLES:
            raise InvalidRequest(
                FIELD,
                f"message {index}: role must be one of {', '.join(ROLES)}, "
                f"got {message.get('role')!r}",
            )
        if not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise InvalidRequest(FIELD, f"message {index}: content must be text, got {kind}")
    return [dict(message) for message in messages]
