"""Writes what Hugging Face tokenizers answers, for the C++ tokenizer to be compared with.

Usage: make_cases.py SMOLLM2_TOKENIZER_JSON OUT_JSON

The output is a list of {"name", "tokenizer", "encode", "decode"}: the text of a tokenizer.json (null
for the given one), cases of encoding, and cases of decoding. Four of the tokenizers are small ones,
trained here, with the structure of well-known models' files.
"""

import json
import random
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SEED = 20240607
ENCODE_CASES = 1200
DECODE_CASES = 300

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

CORPUS = """
The broker owns every slab and the workers hold grants; it isn't theirs to keep, they'll give it back.
We've measured 12345 restores in 678 seconds, that's 18.2 per second. I'm sure you'd call it quick!
int main(int argc, char** argv) { for (size_t i = 0; i < 100; ++i) { printf("%zu\\n", i); } return 0; }
Le café à côté de la forêt était fermé, où êtes-vous allés? Die Straße führt über die Brücke; größer!
Το γρήγορο ζώο πηδά πάνω από τον τεμπέλη σκύλο. Быстрая лиса прыгает через ленивую собаку.
内存代理拥有所有的内存块。日本語のテキストも少しだけあります。한국어 문장도 하나 있습니다.
यह हिंदी में एक वाक्य है। هذه جملة باللغة العربية. זה משפט בעברית. นี่คือประโยคภาษาไทย
🙂👍🏽👩‍👩‍👧‍👦 🇫🇷 ½ ² Ⅻ ① ٣٤٥ १२३
"""

SPECIALS = ["<|begin|>", "<|end|>", "<|end|>x", "<|im start|>", "<tool>", "</tool>"]

AWKWARD = [
    "", " ", "  ", "\n", "\r\n", "\t\t ", "a", "'s", "'S", "'ſ", "it'S", "WE'LL", "'ll'll", "\u212a",
    "\u00a0", "\u0085", "\u180e", "\u2028", "\u3000x", "x\u200b", "\u200d", "\ufeff", "\ue000",
    "\u0041\u030a", "\u1100\u1161\u11a8", "\u0344", "\u0958", "\u1e9b\u0323", "e\u0323\u0301",
    "\U0001d15e", "\uf900", "\u0300", "\x00", "\x7f", "\x1b[0m", "\U0010ffff", "\U000e0041",
    "<|begin|", "<|begin|><|end|>", "<|end|>x", "<|end|> x", "  <tool>  \n x", "a<tool>b", "<tool>_",
    "é<tool>", "<tool>é", "\u0301<tool>", "1<tool>2", "x  </tool>  y", "</tool></tool>", "cafe\u0301",
    "Ⓐ<tool>", "\u200d<tool>", "\u203f<tool>", "  ", "a  b", "a \n b", " \n\n ", "\n \n", "   x",
    "1234567890", "12 345", "٣٤٥", "½²", "a1b2", "don't can't", "http://a.b/c?d=e", "_a_", "...!!!\n\n",
]


def assigned_characters():
    """Code points assigned in Python's (older) Unicode; both engines agree on those."""
    groups = {}
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        if category not in ("Cn", "Cs", "Co"):
            groups.setdefault(category, []).append(chr(code))
    return groups


class RandomText:
    def __init__(self, rng):
        self.rng = rng
        self.groups = assigned_characters()
        self.categories = sorted(self.groups)
        self.words = CORPUS.split()

    def piece(self):
        rng = self.rng
        kind = rng.randrange(10)
        if kind < 3:
            return rng.choice([" ", "", "  ", "\n"]) + rng.choice(self.words)
        if kind == 3:
            return "".join(rng.choice(" \t\n\r\u00a0\u3000\u0085\u2028") for _ in range(rng.randint(1, 6)))
        if kind == 4:
            return "".join(rng.choice("0123456789٣½") for _ in range(rng.randint(1, 8)))
        if kind == 5:
            return rng.choice(SPECIALS + ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
        if kind == 6:
            return rng.choice("aeouAEO가") + "".join(
                rng.choice(self.groups["Mn"][:120]) for _ in range(rng.randint(1, 3)))
        if kind == 7:
            return rng.choice(["'s", "'T", "'ll", "'", "!!", "?\n", "--", "a's"])
        return "".join(rng.choice(self.groups[rng.choice(self.categories)])
                       for _ in range(rng.randint(1, 5)))

    def text(self):
        return "".join(self.piece() for _ in range(self.rng.randint(1, 8)))


def train(pre_tokenizer, normalizer=None, vocab_size=900, alphabet=True, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    initial = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    special = [model["unk_token"]] if "unk_token" in model else []
    tokenizer.train_from_iterator(
        [CORPUS] * 3,
        trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, show_progress=False,
                            initial_alphabet=initial, special_tokens=special))
    return tokenizer


def split_then_bytes(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior, invert),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def llama3_like():
    tokenizer = train(split_then_bytes(LLAMA3_PATTERN), ignore_merges=True)
    tokenizer.add_special_tokens(SPECIALS[:4])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
    ])
    return tokenizer


def qwen2_like():
    tokenizer = train(split_then_bytes(QWEN2_PATTERN), normalizers.NFC())
    tokenizer.add_special_tokens(SPECIALS[:3])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False),
                          AddedToken("café", normalized=True, special=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def gpt2_like():
    """Prefix space, contiguous digits, bytes without tokens, and every flag of an added token."""
    tokenizer = train(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False),
                                 pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        alphabet=False, vocab_size=600, unk_token="<unk>", fuse_unk=True)
    tokenizer.add_special_tokens([AddedToken("<|end|>", lstrip=True, normalized=False)])
    tokenizer.add_tokens([
        AddedToken("<tool>", single_word=True, normalized=True, special=False),
        AddedToken("</tool>", lstrip=True, rstrip=True, normalized=False, special=False),
        AddedToken("<|begin|>", rstrip=True, normalized=True, special=False),
    ])
    return tokenizer


def removing():
    """Words only: what the pattern does not match is dropped."""
    return train(split_then_bytes(r"\p{L}+|'[st]", "removed", True), vocab_size=500)


def encode_case(tokenizer, text, add_special, parse_special):
    tokenizer.encode_special_tokens = not parse_special
    ids = tokenizer.encode(text, add_special_tokens=add_special).ids
    tokenizer.encode_special_tokens = False
    return {"text": text, "add_special": add_special, "parse_special": parse_special, "ids": ids}


def cases(name, tokenizer, inline, rng, texts):
    encode = [encode_case(tokenizer, text, bool(i % 2), True) for i, text in enumerate(AWKWARD)]
    encode += [encode_case(tokenizer, text, True, False) for text in AWKWARD]
    for _ in range(ENCODE_CASES):
        encode.append(encode_case(tokenizer, texts.text(), rng.random() < 0.5, rng.random() < 0.7))
    size = tokenizer.get_vocab_size()
    decode = [{"ids": case["ids"]} for case in encode[:DECODE_CASES]]
    decode += [{"ids": [rng.randrange(size + 3) for _ in range(rng.randint(0, 12))]}
               for _ in range(DECODE_CASES)]
    for case in decode:
        case["text"] = tokenizer.decode(case["ids"], skip_special_tokens=True)
    return {"name": name, "tokenizer": tokenizer.to_str() if inline else None,
            "encode": encode, "decode": decode}


def main():
    smollm2_path, out_path = sys.argv[1:]
    rng = random.Random(SEED)
    texts = RandomText(rng)
    smollm2 = Tokenizer.from_file(smollm2_path)
    result = [cases("smollm2", smollm2, False, rng, texts)]
    for make in (llama3_like, qwen2_like, gpt2_like, removing):
        result.append(cases(make.__name__, make(), True, rng, texts))
    with open(out_path, "w", encoding="ascii") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main()
