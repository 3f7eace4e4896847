"""What goes into the goldens: prompts, texts, conversations, templates, rotary settings."""

from __future__ import annotations

from typing import Any

_PASSAGE = (
    "The lighthouse stood at the end of a long spit of gravel, and for most of the year the only "
    "way to reach it was by boat. Martha had kept the light for eleven years. She rose before "
    "dawn, climbed the iron stairs, trimmed the wick, and wrote the weather in a heavy ledger: "
    "wind from the north-west, sea moderate, visibility good. In the afternoons she repaired "
    "nets for the fishermen of the village, who paid her in flour, lamp oil and news. The news "
    "was usually about prices and weddings. Once it was about a war, far away, in a country whose "
    "name she had to look up in her brother's old atlas.\n"
    "In the autumn of her twelfth year a ship came too close. It was a grey, narrow vessel with "
    "no flag, and it moved as if nobody were steering. Martha saw it first as a shadow in the "
    "fog, then as a sound: water breaking against a hull that should not have been there. She "
    "rang the bell until her arms ached. She lit the second lamp, the one that the inspectors "
    "said must be saved for emergencies, and turned it by hand so that the beam swept over the "
    "rocks, again and again. Slowly, the ship turned. It passed so near that she could read the "
    "letters on its side, and count the windows, all dark.\n"
    "When the fog lifted, the sea was empty. The fishermen had seen nothing. The harbour master, "
    "a careful man with a careful beard, asked her to describe the vessel, and wrote down what "
    'she said, and then put the paper in a drawer with many other papers. "Perhaps", he told '
    'her, "you should take a week on land." Martha thanked him and rowed back. That night she '
    "opened the ledger and, under the weather, she drew the letters as she remembered them. There "
    "were seven. She did not know the alphabet, but she was sure of every stroke. In the spring "
    "an old teacher came to the island to watch the birds, and Martha showed him the page. He "
    "looked at it for a long time. Then he took off his glasses, cleaned them, and said that the "
    "word was the name of a lighthouse. Question: what had Martha seen, and why did the ship "
    "carry that name? Answer:"
)

# (name, text or conversation). Where numbers follow line ends or several spaces, transformers'
# GGUF tokenizer goes its own way (see generate.py), so no prompt has that.
PROMPTS: list[tuple[str, str | list[dict[str, str]]]] = [
    ("capital", "The capital of France is"),
    ("single token", "Hello"),
    ("long", _PASSAGE),
    ("multi-byte", "Ďábel řekl: „Příliš žluťoučký kůň“ — 龜 means turtle, and 🫠 👩‍👩‍👧‍👦 means"),
    ("chat", [{"role": "user", "content": "Why is the sky blue?"}]),
    (
        "chat turns",
        [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Name a large animal."},
            {"role": "assistant", "content": "The blue whale."},
            {"role": "user", "content": "Where does it live?"},
        ],
    ),
    ("code", 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'),
    ("story", "Once upon a time, in a small village by the sea, there lived"),
    ("science", "Photosynthesis is the process by which"),
    ("list", "Three primary colours are red,"),
    ("french", "Le petit chat est assis sur"),
    ("number", "2 + 2 = 4 and 3 + 5 ="),
]

CORPUS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "Hello  world,   three    four",
    "I'm sure they've said it's John's; we'll see, you'd know, I'D SAY'S",
    "12345 007 3.14159 -2e10 1,000,000 ½ ² Ⅷ ٣٤٥ 二〇",
    "In 1969, 2 men; 3rd, 4x4, abc123def 50%",
    "    four spaces\n\ttab\n\n\nthree ends\r\nwindows\r\n\r\n  end  ",
    "trailing space ",
    "\n",
    "\n\n1. one\n\n2. two",
    "x =   5\n    7\n\t8",
    "ďábel řekl příliš žluťoučký kůň úpěl ďábelské ódy",
    "Straße ÅÄÖ ñandú œuvre İstanbul ﬁ ligature",
    "Привет, мир! Γειά σου Κόσμε שלום مرحبا",
    "你好，世界。日本語のテキスト 한국어 龜 \U0002a6d6",
    "🙂🫠👍🏽👩‍👩‍👧‍👦🇨🇿 e\u0301 a\u0300\u0323 zero\u200bwidth nb\u00a0sp \u3000",
    "def f(x: int) -> str:\n    if x > 0:\n        return f\"{x:>10}\"\n    # no\n    return ''\n",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "<div class=\"a\">&amp;</div> https://example.org/a?b=c&d=%20#e",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10; -- comment",
    "camelCaseIdentifier snake_case_identifier SCREAMING_CASE kebab-case",
    "!!!???...,,,;;;:::---___***+++===///\\\\\\|||~~~```",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|>c<|im_end|>  <repo_name>x<file_sep>y",
    "<|im_start <|im_end|< |im_end|> <|IM_END|>",
    "\x00\x01\x7f control \x1b[0m",
    "\ufeffBOM and \ufffd replacement",
]  # fmt: skip

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <b>&</b>\n"}],
    [
        {"role": "user", "content": "  Ahoj, 龜!  "},
        {"role": "assistant", "content": "Hi 🙂"},
        {"role": "user", "content": ""},
    ],
]

# What templates of published models use: whitespace rules, filters, loop controls, special tokens.
TEMPLATES = [
    "{{ bos_token }}\n{% for message in messages %}\n    {% if loop.first %}\n first: {% endif %}\n"
    "    {{- '[' + message.role | upper + '] ' + message['content'] | trim }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n{{ eos_token }}>\n{% endif %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}",
    "{%- set ns = namespace(last='') -%}\n{%- for m in messages -%}\n"
    "  {%- if loop.index0 > 1 -%}{%- break -%}{%- endif -%}\n"
    "  {%- set ns.last = m.content -%}\n{%- endfor -%}\n"
    "{{ messages | map(attribute='role') | join(',') }}|{{ ns.last }}|"
    "{{ messages | tojson(indent=1) }}",
]

_LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
_LLAMA_1B = _LLAMA_8B | {"hidden_size": 2048, "head_dim": 64}
# A small random model (`tests/tiny.py`) and a prompt that goes past the original 8,192 positions.
LONG_MODEL: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "layers": 1,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3"} | _LLAMA31,
    "max_position_embeddings": 16384,
    "eos_token_ids": (2,),
    "config": {"eos_token_id": 2, "bos_token_id": 1},
    "tokenizer": False,
}
LONG_PROMPT = [(7 * i + i // 5) % 64 for i in range(8192 + 256)]
LONG_POSITIONS = (63, 4096, 8191, 8192, 8300, 8447)
ROPE_POSITION = 9000  # past the original 8,192
ROPE_CONFIGS: list[dict[str, Any]] = [
    {"name": "null", "config": _LLAMA_8B | {"rope_theta": 500000.0, "rope_scaling": None}},
    {"name": "theta alone", "config": _LLAMA_1B | {"rope_theta": 100000.0}},
    {"name": "nothing", "config": _LLAMA_1B},
    {
        "name": "llama3",
        "config": _LLAMA_8B
        | {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3"} | _LLAMA31},
    },
    {
        "name": "llama3, factor 32",
        "config": _LLAMA_1B
        | {
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA31 | {"rope_type": "llama3", "factor": 32},
        },
    },
    {
        "name": "legacy key type",
        "config": _LLAMA_1B
        | {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3"} | _LLAMA31},
    },
    {
        "name": "rope_parameters, default",
        "config": _LLAMA_1B | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    },
    {
        "name": "rope_parameters, llama3",
        "config": _LLAMA_1B
        | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3"} | _LLAMA31},
    },
    {
        "name": "rope_parameters beside rope_theta",
        "config": _LLAMA_1B
        | {"rope_theta": 250000.0, "rope_parameters": {"rope_type": "llama3"} | _LLAMA31},
    },
    {
        "name": "other factors",
        "config": _LLAMA_1B
        | {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 1024,
            },
        },
    },
]

# Sampling parameters that transformers has processors for, over a vocabulary of
# PROCESSOR_VOCAB; tokens of the prompt and of the output, and EOS tokens.
PROCESSOR_VOCAB = 48
PROCESSORS: list[dict[str, Any]] = [
    {
        "name": "repetition over prompt and output",
        "params": {"repetition_penalty": 1.3},
        "prompt": [3, 9, 9, 21],
        "output": [9, 30, 47],
        "eos": [2],
    },
    {
        "name": "repetition below one",
        "params": {"repetition_penalty": 0.6},
        "prompt": [0, 11, 12],
        "output": [],
        "eos": [2],
    },
    {
        "name": "a bias for single tokens",
        "params": {"logit_bias": {"0": 2.5, "17": -4.0, "46": 31.0}},
        "prompt": [5, 6],
        "output": [17],
        "eos": [2],
    },
    {
        "name": "words that never come",
        "params": {"bad_token_ids": [1, 16, 40]},
        "prompt": [5],
        "output": [8, 8],
        "eos": [2],
    },
    {
        "name": "too early to end",
        "params": {"min_tokens": 3},
        "prompt": [5, 7, 13],
        "output": [4, 4],
        "eos": [2, 33],
    },
    {
        "name": "late enough to end",
        "params": {"min_tokens": 2},
        "prompt": [5, 7, 13],
        "output": [4, 4],
        "eos": [2, 33],
    },
    {
        "name": "all of them",
        "params": {
            "bad_token_ids": [1, 40],
            "min_tokens": 9,
            "logit_bias": {"4": 1.25, "33": 7.0},
            "repetition_penalty": 1.8,
        },
        "prompt": [4, 20, 21],
        "output": [22, 22, 40],
        "eos": [2, 33],
    },
]
