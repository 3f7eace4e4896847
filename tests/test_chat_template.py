"""Chat templates: rendered as transformers does, refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conflux_jax.chat_template import ChatTemplate
from conflux_jax.models.spec import ModelError
from conflux_jax.request import InvalidRequest
from conflux_jax.text import TextCodec, open_text
from conflux_jax.tokenizer_files import read_tokenizer
from tests.tiny import write_tiny_llama

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizer.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> TextCodec:
    return open_text(smollm2_path)


@pytest.mark.parametrize("case", GOLDENS["chats"], ids=range(len(GOLDENS["chats"])))
def test_chats_render_as_transformers(smollm2: TextCodec, case: dict[str, Any]):
    assert smollm2.render_chat(case["messages"]) == case["prompt"]
    assert smollm2.render_chat(case["messages"], False) == case["no_generation_prompt"]
    ids = smollm2.encode_chat(case["messages"])
    assert smollm2.decode(ids, skip_special_tokens=False) == case["prompt"]
    assert ids[0] == smollm2.bos_token_id


@pytest.mark.parametrize("case", GOLDENS["templates"], ids=range(len(GOLDENS["templates"])))
def test_templates_render_as_transformers(case: dict[str, Any]):
    template = ChatTemplate(case["template"], GOLDENS["special_tokens"])
    messages = [chat["messages"] for chat in GOLDENS["chats"]]
    assert [template.render(m) for m in messages] == case["prompts"]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hello", "must be a list, got str"),
        ({"role": "user"}, "must be a list, got dict"),
        (["hello"], "message 0 must be an object, got str"),
        ([{"content": "hello"}], "message 0: role must be one of system, .* got None"),
        ([{"role": "User", "content": "hello"}], "message 0: role must be one of .* got 'User'"),
        ([{"role": "user"}], "message 0: content must be text, got NoneType"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "message 1: content"),
    ],
)
def test_wrong_messages(messages: Any, problem: str):
    with pytest.raises(InvalidRequest, match="messages: .*" + problem) as caught:
        ChatTemplate("", {}).render(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "has no chat template"),
        ("{% if %}", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
        ("{{ messages[7].content }}", "fails: UndefinedError"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{{ ''.format_map }}{{ cycler.__init__.__globals__ }}", "fails: SecurityError"),
        ("{% for i in range(100001) %}{% endfor %}", "fails: OverflowError"),
    ],
)
def test_wrong_templates(template: str | None, problem: str):
    with pytest.raises(InvalidRequest, match=problem) as caught:
        ChatTemplate(template, {}).render([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_the_date_in_a_template():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {})
    year = template.render([{"role": "user", "content": "hi"}])[:4]
    assert 2024 <= int(year) < 3000


def test_where_a_directory_keeps_its_template(tmp_path: Path):
    write_tiny_llama(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, rendered in (("one", "one"), (named, "D")):
        path.write_text(json.dumps(config | {"chat_template": value}))
        assert open_text(tmp_path).render_chat([{"role": "user", "content": "x"}]) == rendered
    path.write_text(json.dumps(config | {"chat_template": None}))
    assert read_tokenizer(tmp_path).chat_template is None
    path.write_text(json.dumps(config | {"chat_template": 5}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
        open_text(tmp_path)
    path.write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    codec = open_text(tmp_path)
    assert codec.render_chat([{"role": "user", "content": "x"}]) == "file <|im_end|>"
