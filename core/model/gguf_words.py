"""Pre-tokenizers of GGUF files by name (`tokenizer.ggml.pre`), as in llama.cpp's table.

Each regular expression splits the pieces of the one before it. Several names stand for the same pre-tokenizer.
"""

from __future__ import annotations

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASH_TAIL = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _SLASH_TAIL
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}|" + _SLASH_TAIL
# Kimi: Chinese characters stand apart.
_NO_HAN = [kind.replace("]", r"&&[^\p{Han}]]") for kind in (_UPPER, _LOWER)]
_KIMI = r"[\p{Han}]+|" + (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?")).replace(_UPPER, _NO_HAN[0]).replace(
    _LOWER, _NO_HAN[1]
)
_KIMI += r"|\p{N}{1,3}|" + _TAIL
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_KANA = f"[{_CJK}]+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION_LLM = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|[{_CJK}]+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_SPACES = "|".join([r"\s*[\r\n]+", *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s{1}"])
_JAIS2 = _LLAMA3.replace(r"\s*[\r\n]+|\s+(?!\S)|\s+", _SPACES)
_IMAGE_TOKENS = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )")

_LLAMA_NAMES = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "jina-v5-nano",
)
_BY_WORDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("default",), (_PUNCTUATION, _GPT2, r"\p{N}+", _THREE_DIGITS)),
    (
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "mpt"),
            *("roberta-bpe", "modern-bert", "gigachat", "a.x-4.0", "mellum", "olmo", "jais", "trillion", "exaone4"),
            "granite-docling",
        ),
        (_GPT2,),
    ),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), (r"\p{N}", _GPT2)),
    ((*_LLAMA_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    (
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        (_QWEN2,),
    ),
    (("qwen35",), (_QWEN35,)),
    (("laguna",), (r"[^\n]+|[\n]+", _QWEN2)),
    (("ufakzeka",), (_QWEN2.removeprefix(_CONTRACTIONS + "|"),)),
    (("minicpm5",), (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))),
    (("jais-2",), (_JAIS2,)),
    (("seed-coder",), (_QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    (
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    (
        ("exaone-moe",),
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    (("tekken",), (_TEKKEN,)),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"), (_GPT4O,)),
    (("kimi-k2",), (_KIMI,)),
    (("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    (("youtu",), (_YOUTU, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"))),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (r"\p{N}{1,3}", _KANA, _DEEPSEEK3)),
    (
        ("spark2_5",),
        (*(r"\p{N}{1,3}", _KANA), _DEEPSEEK3.replace(r"+[\r\n]*", "+").replace(r"\s*[\r\n]+", r"[\r\n]"), r"\p{N}"),
    ),
    (("deepseek-llm",), (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _PUNCTUATION_LLM, r"\s+$", _HAN, r"\p{N}+")),
    (("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    (("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
    (("poro-chat", "bloom", "gpt3-finnish"), (_BLOOM,)),
    (("viking",), (_BLOOM, r"\p{N}")),
    (("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    (("chameleon",), (*_IMAGE_TOKENS, r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2)),
)

WORDS = {name: words for names, words in _BY_WORDS for name in names}
# Words in the vocabulary are not split further.
WHOLE_WORDS_FIRST = frozenset((*_LLAMA_NAMES, "tekken", "minicpm5", "youtu", "granite-embed-multi-97m"))
# A beginning-of-sequence token is added unless the file says otherwise.
ADD_BOS = frozenset((*_LLAMA_NAMES, "tekken", "chameleon"))
# The models' own tokenizers normalize text to NFC.
COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35", "megrez"))
