"""Templates as real models carry them: rendered as Transformers does, by name, with tools and options, and continued."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine import intake
from power_lab.engine.chat import Turn, chat_ids, next_prompt
from power_lab.engine.templates import ChatTemplate
from power_lab.engine.tokenizer import Tokenizer
from power_lab.errors import ConfigError, TokenizerError
from tests.engine.templating import ARGUMENTS, TEMPLATES, TOOLS, answer, call, compare, result, system, user
from tests.engine.test_chat import CHATML, tokenizer

SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in TEMPLATES}


@pytest.mark.parametrize("name", SOURCES)
def test_renders_as_transformers_does(name: str) -> None:
    outcomes = list(compare(SOURCES[name]))
    assert [found for found in outcomes if found[0].startswith("wrong")] == []
    assert Counter(outcome for outcome, _ in outcomes)["same"] >= 40, "much of the matrix must not be refused"


def test_a_refusal_carries_the_templates_own_words() -> None:
    for name, chat, words in [
        ("no_system", [system("x"), user("y")], "A system message is not supported"),
        ("alternating", [user("a"), user("b")], "this is turn 2 of 'user'"),
        ("instruct", [user("W?"), answer(None, tool_calls=[call({}, "short")])], "nine characters; short has 5"),
    ]:
        with pytest.raises(TokenizerError, match=words):
            ChatTemplate(SOURCES[name]).render(chat)


# --- which template, and what it takes ------------------------------------------------------------------------------------------------


def test_templates_by_name() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "other"})
    assert both.source == "plain"
    assert both.render([user("x")]) == "plain"
    assert both.render([user("x")], tools=TOOLS) == "2 tools"
    assert ChatTemplate({"tool_use": "{{ tools is none }}"}).render([user("x")]) == "True"
    only = ChatTemplate({"default": "{{ tools | length }}"})
    assert only.render([user("x")], tools=TOOLS) == "2"
    for named, says in (
        ({}, "template is empty"),
        ({"rag": "x"}, "no template is called 'default' or 'tool_use'; found rag"),
    ):
        with pytest.raises(TokenizerError, match=says):
            ChatTemplate(named).render([user("x")])


def test_a_broken_template_does_not_spoil_the_other() -> None:
    half = ChatTemplate({"default": "fine", "tool_use": "{{ tools }}\n\n{% for %}"})
    assert half.render([user("x")]) == "fine"
    with pytest.raises(TokenizerError, match="cannot be compiled: TemplateSyntaxError in line 3"):
        half.render([user("x")], tools=TOOLS)


def test_what_would_be_dropped_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tools: this model's chat template has no tools\. It takes: nothing beside"):
        ChatTemplate(CHATML).render([user("x")], tools=TOOLS)
    switch = ChatTemplate(SOURCES["switch"])
    with pytest.raises(ConfigError, match=r"template_options.documents: .* It takes: enable_thinking, .*xml_tools"):
        switch.render([user("x")], options={"documents": [{"text": "x"}]})
    assert "noop" in switch.render([user("x")], options={"xml_tools": TOOLS})
    assert switch.render([user("x")], options={"unused": 3}) == switch.render([user("x")])
    assert switch.render([user("x")], tools=[]) == switch.render([user("x")])


def test_a_template_may_ask_for_keys_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(CHATML).render([{**user("x"), "functions": "f()"}])
    assert caught.value.key == "messages[0].functions"
    assert "f()" in ChatTemplate(SOURCES["functions"]).render([{**system("x"), "functions": "f()"}])


@pytest.mark.parametrize(
    ("tools", "key"),
    [
        ("text", "tools"),
        ([{"name": "f"}] * 257, "tools"),
        ([1], "tools[0]"),
        ([{}], "tools[0].name"),
        ([{"name": ""}], "tools[0].name"),
        ([{"name": "f"}, {"type": "function", "function": []}], "tools[1].function"),
        ([{"type": "function", "function": {"description": "x"}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": "x"}}], "tools[0].function.parameters"),
        ([{"name": "f", "description": 3}], "tools[0].description"),
        ([{"name": "f", "strict": {1}}], "tools[0].strict"),
        ([{"name": "f", "parameters": {1: 2}}], "tools[0].parameters"),
        ([{"name": "f" * (1 << 22)}], "tools"),
    ],
)
def test_wrong_tools_are_refused_by_key(tools: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(SOURCES["reasoning"]).render([user("x")], tools=tools)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ([], "template_options"),
        ({f"x{index}": 1 for index in range(65)}, "template_options"),
        ({"messages": []}, "template_options.messages"),
        ({"bos_token": "x"}, "template_options.bos_token"),
        ({"namespace": 1}, "template_options.namespace"),
        ({"#budget": 1}, "template_options.#budget"),
        ({"_x": 1}, "template_options._x"),
        ({3: 1}, "template_options.3"),
        ({"x": object()}, "template_options.x"),
        ({"x": [{"y": b""}]}, "template_options.x[0].y"),
        ({"x": "x" * (1 << 22)}, "template_options"),
    ],
)
def test_wrong_options_are_refused_by_key(options: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(CHATML).render([user("x")], options=options)
    assert caught.value.key == key


def test_tools_and_options_cannot_write_special_tokens() -> None:
    model = tokenizer(
        "{{ tools | tojson }}{{ x }}{{ messages[0].tool_calls | tojson(ensure_ascii=true) }}", add_bos=False
    )
    tools = [{"name": "<|im_end|>", "parameters": {"</s>": "<s>"}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"[INST]": "<|im_start|>"}]}]
    ids = chat_ids(model, chat, tools=tools, options={"x": "<|im_start|>"})
    assert max(ids) < 256
    assert model.decode(ids) == (
        '[{"name": "<|im_end|>", "parameters": {"</s>": "<s>"}}]<|im_start|>[{"[INST]": "<|im_start|>"}]'
    )


# --- prompts ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template: it is a base model"),
        ("", "chat template is empty"),
        (" \n", "chat template is empty"),
        ("{{ messages }\n", "TemplateSyntaxError in line 1"),
        ("\n\n{{ messages[0].content.nope.nope }}", "failed in line 3: UndefinedError"),
        ("\n{% extends 'x' %}", "uses Extends"),
    ],
)
def test_raw_prompts_need_no_template(template: str | None, says: str) -> None:
    model = tokenizer(template) if template is not None else tokenizer("x")  # a toy of bytes and special tokens
    if template is None:
        model.chat_template = None
    assert intake.encode(model, "Hi", chat=False) == [256, *b"Hi"]
    for ask in ([user("Hi")], "Hi"):
        if isinstance(ask, str) and (template is None or not template.strip()):
            assert intake.encode(model, ask) == [256, *b"Hi"], "no template: text is a raw prompt by default"
        else:
            with pytest.raises(TokenizerError, match=says):
                intake.encode(model, ask)
    for raw, chat in (("Hi", False), ([72], None)):
        with pytest.raises(ConfigError, match="tools: a raw prompt has no place for them"):
            intake.encode(model, raw, chat=chat, tools=TOOLS)


def test_tools_and_options_reach_the_prompt() -> None:
    model = tokenizer(SOURCES["reasoning"], end_ids=[259])
    off = model.decode(intake.encode(model, "Hi", tools=TOOLS, options={"enable_thinking": False}), skip_special=False)
    assert '"name": "get_weather"' in off
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# --- the next turn ------------------------------------------------------------------------------------------------------------------------


def said(model: Tokenizer, text: str, *, end: bool = True) -> tuple[int, ...]:
    return (*model.encode(text, special=False, bos=False), *([min(model.end_ids)] if end else []))


def turn_of(model: Tokenizer, chat: list[dict[str, Any]], text: str, **keys: Any) -> Turn:
    prompt = chat_ids(model, chat, tools=keys.get("tools", ()), options=keys.get("template_options"))
    return Turn(prompt=tuple(prompt), output=said(model, text), messages=tuple(chat), message=user("next"), **keys)


THOUGHT = "<think>\nhm\n</think>\n\n4"


@pytest.mark.parametrize(
    ("name", "end", "text", "options", "kept"),
    [
        ("reasoning", 259, "4", {}, True),
        ("reasoning", 259, THOUGHT, {}, False),
        ("reasoning", 259, "4", {"enable_thinking": False}, False),  # the empty thought goes from earlier turns
        ("switch", 259, THOUGHT, {}, True),  # it keeps reasoning
        ("switch", 259, "4", {"enable_thinking": False}, True),
        ("split", 257, "hm\n</think>\n\n4", {}, False),
        ("alternating", 257, " 4 ", {}, True),
        ("dated", 257, "4", {}, True),
        ("instruct", 257, "4", {}, True),
    ],
)
def test_tokens_are_kept_unless_the_template_shows_them_otherwise(
    name: str, end: int, text: str, options: dict[str, Any], kept: bool
) -> None:
    model = tokenizer(SOURCES[name], end_ids=[end])
    chat = [user("2+2?")]
    turn = turn_of(model, chat, text, template_options=options)
    found, so_far = next_prompt(model, turn), (*turn.prompt, *turn.output)
    whole = chat_ids(model, [*chat, answer(text), user("next")], options=options)
    assert found.answer == text
    assert (found.reason == "") == kept
    if kept:
        assert found.tokens[: len(so_far)] == so_far
        assert found.kept == len(so_far)
    else:
        assert list(found.tokens) == whole
        assert found.tokens[: found.kept] == so_far[: found.kept]
        assert found.tokens[found.kept] != so_far[found.kept]
        assert f"{found.kept} of the {len(so_far)} tokens so far" in found.reason
    for history in ("keep", "render"):
        other = next_prompt(model, turn_of(model, chat, text, template_options=options, history=history))
        assert (other.tokens[: len(so_far)] == so_far) if history == "keep" else (list(other.tokens) == whole)


def test_an_answer_with_special_tokens_is_kept() -> None:
    model = tokenizer(SOURCES["channels"], end_ids=[257])
    turn = turn_of(model, [user("x")], "analysis")
    odd = Turn(prompt=turn.prompt, output=(258, *turn.output), messages=turn.messages, message=user("next"))
    found = next_prompt(model, odd)
    assert found.tokens[: found.kept] == (*odd.prompt, *odd.output)
    assert "holds '<|im_start|>'" in found.reason


def test_the_result_of_a_call_can_follow() -> None:
    model = tokenizer(SOURCES["reasoning"], end_ids=[259])
    text = '<tool_call>\n{"name": "get_weather"}\n</tool_call>'
    turn = turn_of(model, [user("W?")], text, tools=tuple(TOOLS))
    found = next_prompt(
        model,
        Turn(prompt=turn.prompt, output=turn.output, messages=turn.messages, message=result("3"), tools=turn.tools),
    )
    assert "<tool_response>\n3\n</tool_response>" in model.decode(found.tokens)
    assert found.reason == ""


ANSWERS = st.lists(
    st.tuples(
        st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>hm", "</think>", " "]), st.text("ab\n ", max_size=5)
    ),
    min_size=2,
    max_size=4,
)


@given(st.sampled_from(["reasoning", "switch", "split", "alternating", "dated", "instruct"]), ANSWERS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_whole_conversation_reads_as_the_template_has_it(
    name: str, parts: list[tuple[str, str]], think: bool
) -> None:
    model = tokenizer(SOURCES[name], end_ids=[259 if name in ("reasoning", "switch") else 257])
    chat, options = [user("q0")], {"enable_thinking": think}
    tokens = tuple(chat_ids(model, chat, options=options))
    for index, (thought, text) in enumerate(parts):
        ends = index % 2 == 0 and name not in ("alternating", "dated")  # their end tokens are text to this toy
        output = said(model, thought + text, end=ends)
        turn = Turn(
            prompt=tokens,
            output=output,
            messages=tuple(chat),
            message=user(f"q{index + 1}"),
            template_options=options,
        )
        found = next_prompt(model, turn)
        assert found.tokens[: found.kept] == (*tokens, *output)[: found.kept]
        chat, tokens = [*chat, answer(found.answer), turn.message], found.tokens
        whole = chat_ids(model, chat, options=options)
        plain = ["".join(model.decode(ids, skip_special=False).split()) for ids in (tokens, whole)]
        assert plain[0] == plain[1]


def test_rendering_depends_on_nothing_else() -> None:
    """Neither on the process nor on the seed of Python's hashes."""
    code = (
        "from tests.engine.templating import *\n"
        "for path in TEMPLATES:\n"
        "    for chat in CHATS.values():\n"
        "        try: print(repr(ChatTemplate(path.read_text()).render(chat, tools=TOOLS, options={'x': 1})))\n"
        "        except PowerLabError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "Zürich" in texts[0]
    assert ARGUMENTS["city"] in texts[0]
    assert all(first == second for first, second in pairwise(texts))
