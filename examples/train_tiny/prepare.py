"""Turn the Python standard library's source into a tokenizer and two token streams.

    python prepare.py

Writes tokenizer.json, train.npz, heldout.npz and manifest.json to .data/. The manifest lists every
file with its split or the reason why it was dropped. Runs on a CPU in about a minute.
"""

import argparse
import ast
import hashlib
import io
import json
import random
import sys
import sysconfig
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"

# Excluded: third-party packages, and files generated for one machine.
SKIPPED_PARTS = {"site-packages", "dist-packages", "__pycache__"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

# Newlines, indentation, words, digits and punctuation never share a token, so that a prompt
# which ends after any of them is tokenized as training text is. A single space belongs to the
# following token; two or more form a separate one.
PIECES = r"[\r\n]+|\t+| {2,}| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s"


def source_files(root):
    """Yield (relative path, text) of the standard library, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS.intersection(relative.parts):
            continue
        if any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts):
            continue
        try:
            with tokenize.open(path) as file:
                yield relative.as_posix(), file.read()
        except (SyntaxError, UnicodeDecodeError):
            yield relative.as_posix(), None


def literal_share(text):
    """Return the share of a file's code that is string and number literals; docstrings count as code."""
    literals, code, opens_statement = 0, 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT):
            continue
        size = len(token.string.strip())
        code += size
        if token.type in (tokenize.STRING, tokenize.NUMBER) and not opens_statement:
            literals += size
        opens_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return literals / max(code, 1)


def flaw(text, most_literals):
    """Return why a file is unfit for training, or None."""
    if text is None:
        return "undecodable"
    if len(text) < 200:
        return "tiny"
    try:
        ast.parse(text)
        if literal_share(text) > most_literals:
            return "data table"
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return "not valid Python"
    return None


class Duplicates:
    """Detects exact and near copies of the files kept so far."""

    def __init__(self, most_shared):
        self.most_shared = most_shared
        self.digests = set()
        self.holders = defaultdict(list)
        self.kept = 0

    def seen(self, text):
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if digest in self.digests:
            return True
        lines = {" ".join(line.split()) for line in text.splitlines()} - {""}
        shared = Counter(holder for line in lines for holder in self.holders.get(line, ()))
        if shared and max(shared.values()) > self.most_shared * len(lines):
            return True
        self.digests.add(digest)
        for line in lines:
            if len(line) > 3:
                self.holders[line].append(self.kept)
        self.kept += 1
        return False


def train_tokenizer(texts, vocabulary_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # As Llama's, this tokenizer prepends the beginning-of-sequence token to every text.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return tokenizer


def check_round_trip(tokenizer, texts):
    """Assert that decoding restores the text: code, other scripts, control characters, unusual spacing."""
    oddities = [
        "",
        " ",
        "\n",
        "\t\tx = 1\r\n",
        "a \n  b\n\n\n c",
        "naïve 数据 🐍",
        "e\u0301 \u00a0\u2028\x0b\x00",
        "".join(map(chr, range(0x20, 0x3000))),
    ]
    for text in [*oddities, *texts]:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0 and tokenizer.decode(ids[1:]) == text, f"not lossless: {text[:80]!r}"


def token_stream(tokenizer, texts):
    """Return the token stream: an end-of-text token before every file and one after the last."""
    ids = [i for encoding in tokenizer.encode_batch(texts) for i in encoding.ids]
    return np.array([*ids, 0], dtype=np.uint16)


def prepared(folder):
    """Return the folder that this script wrote, as the type of an option of the scripts that read it."""
    if not (Path(folder) / "manifest.json").is_file():
        raise argparse.ArgumentTypeError(f"{folder} has no manifest.json: first run `python prepare.py --out {folder}`")
    return Path(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--out", type=Path, default=HERE / ".data")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--heldout-share", type=float, default=0.05)
    parser.add_argument("--most-literals", type=float, default=0.6)
    parser.add_argument("--most-shared-lines", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    kept, dropped = {}, {}
    duplicates = Duplicates(args.most_shared_lines)
    for name, text in track(list(source_files(args.stdlib)), "reading and filtering"):
        reason = flaw(text, args.most_literals)
        if reason is None and duplicates.seen(text):
            reason = "duplicate"
        if reason is None:
            kept[name] = text
        else:
            dropped[name] = reason

    names = sorted(kept)
    random.Random(args.seed).shuffle(names)
    heldout = names[: round(len(names) * args.heldout_share)]
    train = names[len(heldout) :]

    print("training the tokenizer")
    tokenizer = train_tokenizer((kept[name] for name in train), args.vocabulary)
    check_round_trip(tokenizer, (kept[name] for name in heldout))
    tokenizer.save(str(args.out / "tokenizer.json"))

    manifest = {"python": sys.version.split()[0], "seed": args.seed}
    for side, members in (("train", train), ("heldout", heldout)):
        texts = [kept[name] for name in members]
        tokens = token_stream(tokenizer, texts)
        size = sum(len(text.encode()) for text in texts)
        np.savez_compressed(args.out / f"{side}.npz", tokens=tokens, bytes=size)
        manifest[side] = {"bytes": size, "tokens": len(tokens), "files": sorted(members)}
        print(
            f"{side:8} {len(members):5} files {size:11,} bytes {len(tokens):10,} tokens"
            f"  {size / len(tokens):.2f} bytes/token"
        )
    manifest["dropped"] = dropped
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(f"dropped  {len(dropped):5} files: {dict(Counter(dropped.values()))}")


if __name__ == "__main__":
    main()
