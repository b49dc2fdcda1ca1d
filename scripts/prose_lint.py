#!/usr/bin/env python3
"""Checks the prose of comments, pages, messages and commit subjects, and the size limits of the code.

    scripts/prose_lint.py [--count] [--budget <file>] [--rule <name>]... [--base <commit>] [<file or folder>...]

--count     prints the number of findings per rule and folder instead of the findings
--budget    a file in the format of --count; a rule fails only above its number there
--rule      checks only these rules
--base      the commit after which subjects are checked: by default origin/main or the last tag

The tables below hold every banned word. CONTRIBUTING.md explains the rules.
"""

import argparse
import bisect
import collections
import pathlib
import re
import subprocess
import sys

import size_lint

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAX_WORDS = 25
MAX_CHANGELOG_WORDS = 20
MAX_PAGE_AVERAGE = 18
MAX_HEADER_LINES = 12
MAX_COMMENT_LINES = 3
MAX_DRAWING_LINES = 6  # prose around a drawing or table
MAX_TRAILING = 60
MAX_SUBJECT = 72

# Words that begin a fragment instead of a sentence.
OPENERS = "Of What Where Whether Which Who Whose That Those So Behind Beside".split()
TRAILING_OPENERS = "of that what whose".split()

# (rule, pattern, advice). A pattern is a regular expression of whole words; case does not matter.
BANNED = [
    ("verb", r"tells?|told|telling", "signal, pass or set"),
    ("verb", r"asks?|asked|asking", "evaluate, check, read or request"),
    ("verb", r"says?|said|saying", "state, define or report"),
    ("verb", r"(?:is|are|was|were|be|been|being) made", "compute, create or build"),
    ("verb", r"under way", "in flight, outstanding or running"),
    ("verb", r"(?:gives?|given|giving|gave) (?:back|away)", "return or release"),
    ("verb", r"meets?|met", "reach, match or satisfy"),
    ("verb", r"brings?|brought|bringing", "load, copy or add"),
    ("verb", r"look(?:s|ed|ing)? (?:ahead|at|after)", "prefetch, read or check"),
    ("verb", r"go(?:es)? over", "iterate over or read"),
    ("phrase", r"anew", "again"),
    ("phrase", r"apart", "separate or except"),
    ("phrase", r"at hand", "available"),
    ("phrase", r"behind", "after"),
    ("phrase", r"beside", "next to, or in addition to"),
    ("phrase", r"so many", "a number"),
    ("phrase", r"there (?:is|are) none", "name what is missing"),
    ("phrase", r"nobody|somebody|whoever", "the actor's name"),
    ("phrase", r"by itself", "alone or automatically"),
    ("phrase", r"likewise", "also"),
    ("phrase", r"of (?:its|their) own", "separate"),
    ("phrase", r"the same of", "repeat the noun"),
    ("noun", r"those (?:of|that|which|who|whose|with|for|where)", "repeat the noun"),
    ("noun", r"(?<!so )that of", "repeat the noun"),
    ("noun", r"(?:of|from|by|with|than) what", "name the noun"),
    ("noun", r"(?:the|all|no|any) others", "repeat the noun"),
    ("vocabulary", r"oracles?", "reference"),
    ("vocabulary", r"sabotag\w*", "mutation"),
    ("vocabulary", r"survivors?", "surviving mutation"),
    ("vocabulary", r"hostile", "adversarial"),
    ("vocabulary", r"plain formula", "standard attention"),
    ("vocabulary", r"recorded proofs?", "validation record"),
    ("vocabulary", r"tickets?", "semaphore"),
    ("vocabulary", r"keyless", "without keys"),
    ("history", r"no longer|(?:was|were|been) tried|formerly", "describe only what the code does now"),
]  # fmt: skip
WORD = r"(?<![\w`/-])(?:{})(?![\w`/(-])"
ANY_BANNED = re.compile(WORD.format("|".join(words for _, words, _ in BANNED)), re.I)
BANNED = [(rule, re.compile(WORD.format(words), re.I), advice) for rule, words, advice in BANNED]

# First words of a commit subject that are not an imperative verb, and endings of such words.
NOT_IMPERATIVE = re.compile(
    r"(?:The|A|An|All|Any|Each|Every|Both|No|Not|Some|More|Less|It|This|These|There|One|Two|Three|How|Why|When|If|In|On"
    r"|At|By|For|From|With|Without|To|As|And|Also|Now|Still|Only|Proof|Tests?|Docs?|Fuzz|CI|\d.*|[a-z].*|\w+ing|\w+ed)\b"
)  # fmt: skip
IMPERATIVE = re.compile(r"(?:Test|Document|Fuzz|Bring|Embed|Need|Feed|Seed|Shed|Speed|String|Exceed|Proceed)\b")
SUBJECT_S = re.compile(r"(?:\w*[^aiu]s)\b")  # "Adds", but not "Bias" or "Focus"
# A sentence that begins with a pronoun. "It is unknown whether ..." has no noun that the pronoun replaces.
PRONOUN = re.compile(r"[*_\s]*(?:They|Its|Their|It(?! is (?:un)?(?:known|clear|likely|possible)\b))\b(?!['’])")
SUBJECT_SS = re.compile(r"\w*ss\b")

SKIPPED = re.compile(
    r"(?:.*/)?(?:third_party|frozen_0_1|corpus|recorded|survivors|data)/|docs/results/|build/|out/"
    r"|scripts/prose_lint\.py|tests/scripts/"
)
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|etc|Fig|Eq|No|Sec|approx)\.$")
SENTENCE_END = re.compile(r"(?<=[\w\])`\"'%][.!?])[)\"']?\s+(?=[\"'(`*]*[\w`-])")
MARKER = re.compile(r"(?:clang-format|NOLINT|noqa|shellcheck|SPDX|fmt:|type:|pragma|!|IWYU|ruff:|cmake-)")
DRAWING = re.compile(r"^ {3,}\S|^ {2,}(?![-*\d])\S.* {3,}|\S {3,}\S.*\S {2,}\S|\|.*\||^[-=|+>^ ]{4,}")
C_TOKEN = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|(?P<raw>R"([^\s()\\]{0,16})\(.*?\)\4")"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<char>(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+')""",
    re.S,
)
PYTHON_TOKEN = re.compile(
    r"""(?P<line>\#[^\n]*)|(?P<block>[rbfRBF]{0,2}(?:\"\"\".*?\"\"\"|'''.*?'''))"""
    r"""|(?P<string>[rbfRBF]{0,2}(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))""",
    re.S,
)
SHELL_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'[^']*')|(?P<escape>\\.|\$\#|\$\{\#)|(?P<line>(?<![^\s;(])\#[^\n]*)""", re.S
)

PAGE = re.compile(r"(?<![\w/.:-])((?:(?:vgpu|sass)/)?docs/[\w/-]+\.md)\b")

Finding = collections.namedtuple("Finding", "path line rule text")
# A run of prose: kind is header, comment, trailing, doc, message, heading, cell, entry or paragraph.
Block = collections.namedtuple("Block", "line kind lines")


class Source:
    """A file's text and its line numbers."""

    def __init__(self, text):
        self.text = text
        self.starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def line(self, offset):
        return bisect.bisect_right(self.starts, offset)

    def before(self, offset):
        """The text of the line left of `offset`."""
        return self.text[self.starts[self.line(offset) - 1] : offset]

    def after(self, offset):
        end = self.text.find("\n", offset)
        return self.text[offset : end if end >= 0 else len(self.text)]


def comment_blocks(source, comments):
    """Joins line comments of one column on consecutive lines: (line, column, trailing, lines)."""
    blocks = []
    for offset, text in comments:
        line, before = source.line(offset), source.before(offset)
        trailing, column = bool(before.strip()), len(before)
        if MARKER.match(text.strip()) or re.match(r"\s*namespace\b", text) or before.lstrip().startswith("#endif"):
            continue
        last = blocks[-1] if blocks else None
        if last and not trailing and last[0] + len(last[3]) == line and last[1] == column:
            last[3].append(text)
        else:
            blocks.append((line, column, trailing, [text]))
    return blocks


def paragraphs(lines, first):
    """Splits a comment's lines at empty lines, list items and drawings: (line, text), and the number of prose lines.

    The third result is the number of a drawing's lines.
    """
    result, current, start, prose, drawn = [], [], first, 0, 0
    for number, line in enumerate([*lines, ""], first):
        text = line[1:] if line.startswith(" ") else line
        drawing = bool(DRAWING.search(text))
        item = re.match(r"\s*(?:[-*]|\d+[.)]) +", text)
        if (not text.strip() or drawing or item) and current:
            result.append((start, " ".join(current)))
            current = []
        drawn += drawing
        if not text.strip() or drawing:
            continue
        prose += 1
        if not current:
            start = number
        current.append(text[item.end() :].strip() if item else text.strip())
    return result, prose, drawn


def sentences(text):
    """The sentences of a paragraph, with code spans as one word."""
    text = re.sub(r"`[^`]*`", "`x`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    result = []
    for part in SENTENCE_END.split(text):
        if result and ABBREVIATION.search(result[-1]):
            result[-1] += " " + part
        elif part:
            result.append(part)
    return result


def count_words(sentence):
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


class Prose:
    """The findings of one file."""

    def __init__(self, path):
        self.path, self.findings, self.lengths = path, [], []

    def add(self, line, rule, text):
        self.findings.append(Finding(self.path, line, rule, text))

    def check_words(self, line, text, kind):
        text = re.sub(r"`[^`]*`", "`x`", text)
        if not ANY_BANNED.search(text):
            return
        for rule, pattern, advice in BANNED:
            if rule == "history" and kind not in ("header", "comment", "trailing"):
                continue
            for match in pattern.finditer(text):
                self.add(line, rule, f"'{match.group()}' ({advice}): {text[max(0, match.start() - 30) :][:80]}")

    def check_text(self, line, text, kind):
        """Openers, words and sentence lengths of one paragraph."""
        self.check_words(line, text, kind)
        if kind == "heading":
            return
        limit = MAX_CHANGELOG_WORDS if kind == "entry" else MAX_WORDS
        for sentence in sentences(text):
            first = re.match(r"[\"'(*_\s]*([A-Za-z]+)\b(?!\(|[_.:]\w)", sentence)
            asks = sentence.rstrip("*_\"')").endswith("?")
            if kind not in ("cell", "trailing") and first and first[1].capitalize() in OPENERS and not asks:
                if kind != "message" or first[1][0].isupper():
                    self.add(line, "opener", sentence[:80])
            if kind != "message" and (match := PRONOUN.match(sentence)):
                self.add(line, "pronoun", f"begins with '{match.group().strip()}', name the noun: {sentence[:70]}")
            words = count_words(sentence)
            if kind == "paragraph":
                self.lengths.append(words)
            if words > limit:
                self.add(line, "long", f"{words} words: {sentence[:70]}")

    def check_comment(self, block):
        line, kind, lines = block
        if kind == "trailing":
            text = " ".join(part.strip() for part in lines)
            first = re.match(r"\s*([A-Za-z]+)\b", text)
            if first and first[1].lower() in TRAILING_OPENERS:
                self.add(line, "trailing", f"begins with '{first[1]}': {text[:70]}")
            if len(text) > MAX_TRAILING:
                self.add(line, "trailing", f"{len(text)} characters: {text[:70]}")
            self.check_words(line, text, kind)
            return
        parts, prose, drawn = paragraphs(lines, line)
        limit = MAX_HEADER_LINES if kind == "header" else self.max_comment_lines(drawn)
        if prose > limit and kind != "doc":
            self.add(line, "comment-lines", f"{prose} lines (at most {limit}): {lines[0].strip()[:60]}")
        for start, text in parts:
            self.check_text(start, text, kind)

    def max_comment_lines(self, drawn):
        if self.path.startswith("include/"):
            return MAX_HEADER_LINES
        return MAX_DRAWING_LINES if drawn > 2 else MAX_COMMENT_LINES

    def check_message(self, line, text):
        text = re.sub(r"\\[nt]", " ", text)
        if len(text.split()) < 4 or re.search(r"[;{}=]\s*$|^\s*[#<]|::|\w\(.*\)\s*;|%\w+[,;]", text):
            return
        self.check_text(line, text, "message")


def is_message_path(path):
    return re.match(r"(?:src|cli|tools|sass|vgpu|python)/", path) and not re.search(r"(?:^|/)tests?/", path)


def check_c(prose, source):
    comments, messages = [], []
    for match in C_TOKEN.finditer(source.text):
        kind, start = match.lastgroup, match.start()
        if match["line"]:
            comments.append((start, match["line"][2:].lstrip("/")))
        elif match["block"] and not source.after(match.end()).strip(" \\"):
            for number, text in enumerate(match["block"][2:-2].split("\n")):
                offset = (
                    start if number == 0 else source.starts[source.line(start) - 1 + number] + len(source.before(start))
                )
                comments.append((offset, re.sub(r"^[\s]*\*(?!/)", "", text) if number else text.lstrip("*")))
        elif kind == "string" and is_message_path(prose.path) and not source.before(start).lstrip().startswith("#"):
            messages.append((start, match.end(), match["string"][1:-1]))
    check_line_comments(prose, source, comments)
    check_messages(prose, source, messages)


def check_line_comments(prose, source, comments):
    for line, _, trailing, lines in comment_blocks(source, comments):
        head = not trailing and not re.sub(r"#(?:!.*|pragma once)", "", source.text[: source.starts[line - 1]]).strip()
        prose.check_comment(Block(line, "trailing" if trailing else "header" if head else "comment", lines))


def check_messages(prose, source, messages):
    joined = []
    for start, end, text in messages:
        if joined and not source.text[joined[-1][1] : start].strip():
            joined[-1] = (joined[-1][0], end, joined[-1][2] + text)
        else:
            joined.append((start, end, text))
    for start, _, text in joined:
        prose.check_message(source.line(start), text)


def check_python(prose, source):
    comments, messages = [], []
    for match in PYTHON_TOKEN.finditer(source.text):
        start = match.start()
        if match["line"]:
            comments.append((start, match["line"][1:]))
        elif match["block"]:
            docstring = re.search(r"(?:^|:|^#!.*)\s*\Z", source.text[max(0, start - 80) : start])
            if docstring and not source.before(start).strip():
                body = match["block"].lstrip("rbfRBF")[3:-3].split("\n")
                indent = " " * len(source.before(start))
                body = [" " + line.removeprefix(indent) if line.strip() else "" for line in body]
                prose.check_comment(Block(source.line(start), "doc", body))
        elif is_message_path(prose.path):
            text = re.sub(r"^[rbfRBF]{0,2}.|.$", "", match["string"])
            messages.append((start, match.end(), re.sub(r"\{[^{}]*\}", "`x`", text)))
    check_line_comments(prose, source, comments)
    check_messages(prose, source, messages)


def check_shell(prose, source):
    comments = [(m.start(), m["line"][1:]) for m in SHELL_TOKEN.finditer(source.text) if m["line"]]
    check_line_comments(prose, source, comments)


def page_blocks(text):
    """The paragraphs, headings, items and table cells of a page."""
    current, start, kind, fenced = [], 0, "paragraph", False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fence = re.match(r"\s*(?:```|~~~)", line)
        item = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", line)
        special = fence or fenced or item or not line.strip() or re.match(r"\s*(?:#+ |\||<|>)", line)
        if special and current:
            yield Block(start, kind, current)
            current = []
        if fence:
            fenced = not fenced
        elif fenced or not line.strip() or re.match(r"\s*<", line):
            continue
        elif re.match(r"#+ ", line):
            yield Block(number, "heading", [line.lstrip("# ")])
        elif re.match(r"\s*\|", line):
            yield from (Block(number, "cell", [cell]) for cell in line.strip().strip("|").split("|"))
        else:
            if not current:
                start, kind = number, "paragraph"
            current.append(line[item.end() :] if item else line.strip().lstrip("> "))


def check_page(prose, text):
    is_changelog = pathlib.PurePath(prose.path).name == "CHANGELOG.md"
    for block in page_blocks(re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)):
        kind = "entry" if is_changelog and block.kind == "paragraph" else block.kind
        prose.check_text(block.line, " ".join(block.lines), kind)
    if len(prose.lengths) >= 10 and sum(prose.lengths) > MAX_PAGE_AVERAGE * len(prose.lengths):
        prose.add(1, "page-average", f"{sum(prose.lengths) / len(prose.lengths):.1f} words a sentence")


def check_file(path, text):
    """All findings of one file. `path` is relative to the repository and decides the rules."""
    prose, source, suffix = Prose(path), Source(text), pathlib.PurePath(path).suffix
    name = pathlib.PurePath(path).name
    if suffix in (".c", ".h", ".cpp", ".hpp", ".cuh", ".cu"):
        check_c(prose, source)
    elif suffix == ".py":
        check_python(prose, source)
    elif suffix in (".sh", ".cmake") or name == "CMakeLists.txt" or path == ".ci/run":
        check_shell(prose, source)
    elif suffix == ".md":
        check_page(prose, text)
    else:
        return []
    return prose.findings + [Finding(path, *finding) for finding in size_lint.check(path, text)]


def check_subject(subject):
    """The rule that a commit subject breaks, or None."""
    if len(subject) > MAX_SUBJECT:
        return f"{len(subject)} characters (at most {MAX_SUBJECT}): {subject[:60]}"
    first = subject.split(" ")[0]
    plural = SUBJECT_S.fullmatch(first) and not SUBJECT_SS.fullmatch(first)
    if (NOT_IMPERATIVE.match(first) or plural) and not IMPERATIVE.fullmatch(first):
        return f"must begin with an imperative verb: {subject[:60]}"
    return None


def git(*words):
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def check_subjects(base):
    bases = [base] if base else ["origin/main", git("describe", "--tags", "--abbrev=0")]
    base = next((b for b in bases if b and git("rev-parse", "--verify", "--quiet", b + "^{commit}")), None)
    log = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD") if base else ""
    for line in (log or "").splitlines():
        commit, _, subject = line.partition(" ")
        problem = check_subject(subject)
        if problem:
            yield Finding(f"commit/{commit}", 1, "subject", problem)


def list_files(paths):
    names = git("ls-files", "-co", "--exclude-standard", "--", *(paths or ["."]))
    if names is None:
        found = [p for root in paths or ["."] for p in [ROOT / root, *(ROOT / root).rglob("*")]]
        names = "\n".join(str(p.relative_to(ROOT)) for p in found)
    return sorted(name for name in set(names.splitlines()) if not SKIPPED.match(name) and (ROOT / name).is_file())


def check_paths(texts):
    """Every page that a comment or text names exists: a path from the root, or from the file's product."""
    for path, text in texts.items():
        for match in PAGE.finditer(text):
            roots = (ROOT, ROOT / path.split("/")[0], (ROOT / path).parent)
            if not any((root / match[1]).is_file() for root in roots) and "git show" not in text:
                yield Finding(path, text.count("\n", 0, match.start()) + 1, "path", f"{match[1]} does not exist")


def folder(path):
    parts = path.split("/")
    return parts[0] if len(parts) > 1 else "."


def print_counts(findings):
    """One line per rule: its name, its total, and the number of each folder."""
    counts = collections.defaultdict(collections.Counter)
    for finding in findings:
        counts[finding.rule][folder(finding.path)] += 1
    for rule, folders in sorted(counts.items()):
        print(f"{rule} {sum(folders.values())}", *(f"{name}={n}" for name, n in sorted(folders.items())))


def over_budget(findings, text):
    """The findings of the rules that exceed their number in a budget."""
    budget = {words[0]: int(words[1]) for words in map(str.split, text.splitlines()) if words and words[0] != "#"}
    counts = collections.Counter(finding.rule for finding in findings)
    return [finding for finding in findings if counts[finding.rule] > budget.get(finding.rule, 0)]


def main(words):
    parser = argparse.ArgumentParser(description="Checks prose and size limits.")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--budget", type=pathlib.Path)
    parser.add_argument("--rule", action="append")
    parser.add_argument("--base")
    parser.add_argument("paths", nargs="*")
    args = parser.parse_args(words)
    texts = {path: (ROOT / path).read_text(errors="replace") for path in list_files(args.paths)}
    findings = [finding for path, text in texts.items() for finding in check_file(path, text)]
    findings += [Finding(*finding) for finding in size_lint.check_class_names(texts)]
    findings += check_paths(texts)
    if not args.paths:
        findings += check_subjects(args.base)
    if args.rule:
        findings = [finding for finding in findings if finding.rule in args.rule]
    if args.count:
        print_counts(findings)
        return 0
    if args.budget:
        findings = over_budget(findings, args.budget.read_text())
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.text}")
    if not findings:
        print(f"The prose rules and size limits hold in {len(texts)} files.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
