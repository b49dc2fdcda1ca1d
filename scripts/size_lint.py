"""Size limits of files, functions, parameter lists and pages, and unique class names: used by prose_lint.py."""

import ast
import bisect
import collections
import pathlib
import re

MAX_FILE = 500
MAX_TEST_FILE = 600
MAX_FUNCTION = 80
MAX_MAIN_LOOP = 120
MAX_PARAMETERS = 6
MAX_PAGE = 200
MAX_README = 130
MAX_IF_CONSTEXPR = 8

NO_FILE_LIMIT = re.compile(r"third_party/|.*frozen_0_1/|CHANGELOG\.md|include/")
TABLE = re.compile(r"(?:.*/)?(?:tests?|survivors)/|.*(?:tuning|table|cases)[^/]*$|.*\.(?:inc|def)$")
# Signatures without a limit: interfaces of other projects, drop-ins, and instructions whose operands are parameters.
NO_PARAMETER_LIMIT = re.compile(
    r"kernels/ptx/|python/tandem/(?:compat|flash_attn)/|python/tandem/_?(?:flex|fa3|fa4|flash|sdpa|torch|transformers)"
    r"|vgpu/(?:src/)?driver/|src/gpu/driver/|tests?/|(?:.*/)tests/|include/|bench/|(?:vgpu/)?examples/"
)
FIXED_NAME = re.compile(r"(?:cu[A-Z]|cuda[A-Z]|nvrtc|nvtx|tandem_|[sd]gemm$|main$|LLVMFuzzer)")
PRODUCTS = [
    (re.compile(r"(?:vgpu|cli/vgpu)/(?!.*tests/)"), "vgpu"),
    (re.compile(r"(?:sass/src|sass/cli|sass)/(?!.*tests/)"), "sass"),
    (re.compile(r"(?:kernels|src/plan)/sm\d+/(?:[a-z]+/)?"), None),  # the folder is the scope
    (re.compile(r"(?:src|kernels|cli|tools)/(?!.*tests/)"), "attention"),
]
CODE = (".c", ".h", ".cpp", ".hpp", ".cuh", ".cu")
BLANKED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"([^\s()\\]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.S | re.M,
)
CONTROL = re.compile(r"\s*(?:if|for|while|switch|catch|do|else|return|namespace|class|struct|union|enum|extern)\b")
TEMPLATE = re.compile(r"\s*template\s*<")
CLASS = re.compile(r"\b(?:struct|class)\s+(?:\[\[\w+\]\]\s*|alignas\([^)]*\)\s*)*([A-Z]\w*)\s*(?:final\s*)?(?::[^:]|$)")


def blank(text):
    """Returns the text without comments, strings and preprocessor lines, at the same offsets."""
    return BLANKED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def skip_template(head):
    """Returns a declaration without its `template <...>` prefixes and their requires clauses."""
    while TEMPLATE.match(head):
        depth, end = 0, 0
        for end, c in enumerate(head):
            depth += (c == "<") - (c == ">" and head[end - 1] != "-")
            if c == ">" and depth == 0:
                break
        head = head[end + 1 :]
    return head


def parameter_count(head):
    """Returns (name, parameters) of a function's declaration."""
    match = re.search(r"([\w~]+|operator\s*\S+?)\s*\(", head)
    if not match:
        return "", 0
    depth, commas, text = 0, 0, ""
    for c in head[match.end() :]:
        if c in "(<[{":
            depth += 1
        elif c in ")>]}":
            if depth == 0 and c == ")":
                break
            depth -= 1
        commas += c == "," and depth == 0
        text += c
    return match[1], commas + 1 if text.strip() and text.strip() != "void" else 0


def scopes(code):
    """Returns every function and class:

    (kind, head, first offset, last offset). Bodies of functions are not searched.
    """
    head_start, i, inside = 0, 0, None
    stack = []
    for match in re.finditer(r"[{};]|\b(?:public|private|protected):", code):
        i, c = match.start(), match.group()
        if inside is not None:  # skips a function's body or an initializer
            inside[0] += (c == "{") - (c == "}")
            if inside[0] == 0:
                if inside[1]:
                    yield ("function", inside[2], inside[3], i)
                    head_start = i + 1
                inside = None
            continue
        head = code[head_start:i]
        if c == "{":
            plain = skip_template(head)
            plain = re.sub(
                r"^\s*requires\b.*?(?=\b(?:TANDEM_|inline|static|constexpr|auto|void)\w*)", "", plain, flags=re.S
            )
            is_class = (
                re.match(r"\s*(?:typedef\s+)?(?:struct|class|union|enum)\b", plain) and "(" not in plain.split(":")[0]
            )
            initializes = re.search(r"[\w>]\s*$", head) and re.search(r"\)\s*(?:noexcept\s*)?:[^:]", head)
            assigns = re.search(r"(?<![=!<>])=(?!=)\s*[^()]*$|=\s*\[", re.sub(r"operator\s*\S+?\(", "(", plain))
            if is_class and "enum" not in plain.split("{")[0].split():
                yield ("class", plain, head_start + len(head) - len(head.lstrip()), i)
            if not is_class and not CONTROL.match(plain) and (initializes or assigns or "(" not in plain):
                inside = [1, False]
                continue
            if not is_class and "(" in plain and not CONTROL.match(plain):
                start = head_start + len(head) - len(head.lstrip())
                inside = [1, True, plain, start]
                continue
            stack.append(c)
        elif c == "}" and stack:
            stack.pop()
        head_start = match.end()


def check_functions(path, text):
    code = blank(text)
    starts = [0] + [m.end() for m in re.finditer("\n", code)]
    for kind, head, first, last in scopes(code):
        if kind != "function":
            continue
        line, end = bisect.bisect_right(starts, first), bisect.bisect_right(starts, last)
        name, parameters = parameter_count(head)
        limit = MAX_MAIN_LOOP if name.startswith("mainloop") else MAX_FUNCTION
        if end - line + 1 > limit and not NO_FILE_LIMIT.match(path):
            yield line, "function", f"{name} has {end - line + 1} lines (at most {limit})"
        if parameters > MAX_PARAMETERS and not NO_PARAMETER_LIMIT.match(path) and not FIXED_NAME.match(name):
            yield line, "parameters", f"{name} has {parameters} (at most {MAX_PARAMETERS})"


def check_python(path, text):
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno or 1, "syntax", str(error)
        return
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        lines = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            lines -= node.body[0].end_lineno - node.body[0].lineno + 1
        if lines > MAX_FUNCTION:
            yield node.lineno, "function", f"{node.name} has {lines} lines (at most {MAX_FUNCTION})"
        names = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        if not path.startswith("python/"):
            names += [a.arg for a in node.args.kwonlyargs]
        if len(names) > MAX_PARAMETERS and not NO_PARAMETER_LIMIT.match(path):
            yield node.lineno, "parameters", f"{node.name} has {len(names)} (at most {MAX_PARAMETERS})"


def check(path, text):
    """Returns (line, rule, text) for every limit that a file exceeds."""
    lines, suffix = text.count("\n"), pathlib.PurePath(path).suffix
    if suffix == ".md":
        limit = MAX_README if path == "README.md" else MAX_PAGE
        if lines > limit and path != "CHANGELOG.md":
            yield 1, "page", f"{lines} lines (at most {limit})"
        return
    limit = MAX_TEST_FILE if TABLE.match(path) else MAX_FILE
    if lines > limit and not NO_FILE_LIMIT.match(path):
        yield 1, "file", f"{lines} lines (at most {limit})"
    if suffix in CODE:
        yield from check_functions(path, text)
    elif suffix == ".py":
        yield from check_python(path, text)
    branches = len(re.findall(r"\bif constexpr\b", blank(text))) if path.startswith("kernels/") else 0
    if branches > MAX_IF_CONSTEXPR:
        yield 1, "if-constexpr", f"{branches} (at most {MAX_IF_CONSTEXPR})"


def product(path):
    for pattern, name in PRODUCTS:
        match = pattern.match(path)
        if match:
            return name or match[0]
    return None


def check_class_names(texts):
    """Returns (path, line, rule, text) for every class of a header whose name another header of the product has."""
    places = collections.defaultdict(list)
    for path, text in texts.items():
        if pathlib.PurePath(path).suffix not in (".h", ".hpp", ".cuh") or product(path) is None:
            continue
        code = blank(text)
        for kind, head, first, _ in scopes(code):
            match = CLASS.search(head) if kind == "class" else None
            if match:
                places[product(path), match[1]].append((path, code.count("\n", 0, first) + 1))
    for (_, name), found in sorted(places.items()):
        for path, line in found[1:]:
            yield path, line, "class-name", f"{name} is also in {found[0][0]}"
