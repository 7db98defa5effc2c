#!/usr/bin/env python3
"""Writes what scripts/site.sh gives to Doxygen: the public headers and the pages of the
documentation, changed so that their links work on the site, and a layout whose side bar
has the sections of docs/README.md.

    scripts/site_pages.py build/site_input             before Doxygen
    scripts/site_pages.py --finish build/site_input    after it: links names, finds dead links

- A page gets the name `guides-trainer` for docs/guides/trainer.md, and each heading
  a label, so that `trainer.md#what-it-costs` leads to that heading.
- A link to a public header leads to its page in the reference. A link to another file of
  the tree leads to a copy of it in `files/`.
- The first comment of a header becomes the description on the header's page.
"""

import collections
import csv
import html
import json
import os
import pathlib
import re
import shutil
import sys
import urllib.parse
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import tree  # noqa: E402

START = "docs/README.md"  # its sections are those of the side bar
MAIN = "README.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"(`+)(.+?)\1")
# Doxygen's names, of those that it knows.
LANGUAGES = {"python": "{.py}", "c++": "{.cpp}", "cpp": "{.cpp}"}
# Words of headings that nobody looks for.
UNSEARCHED = set("and are does for from has how its that the this what when where which who with".split())
WIDTH = 100  # of a line in a header
LAYOUT = """<doxygenlayout version="1.0">
<navindex>
<tab type="mainpage" title="hasten"/>
{}<tab type="usergroup" title="Reference">
<tab type="classlist" title="Classes"/>
<tab type="hierarchy" title="Class hierarchy"/>
<tab type="user" url="@ref hasten" title="Functions and types"/>
<tab type="filelist" title="Headers"/>
</tab>
</navindex>
</doxygenlayout>
"""


def page_id(name):
    short = name.removeprefix("docs/").removesuffix(".md")
    return "index" if name == MAIN else "documentation" if name == START else re.sub(r"[/_]", "-", short).lower()


def heading_slug(text):
    """The anchor that GitHub gives to a heading."""
    text = re.sub(r"\]\([^)]*\)", "]", text).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


class Pages:
    def __init__(self, folder):
        self.folder = folder
        names = [str(path) for path in tree.files(ROOT)]
        self.files = set(names)
        self.pages = [n for n in names if n.endswith(".md") and (n.startswith("docs/") or "/" not in n)]
        self.headers = [n for n in names if n.startswith("include/") and n.endswith(".h")]
        self.copied = set()

    def copy(self, name):
        """A file of the tree as a page of text; returns its address on the site."""
        address = f"files/{name}.html"
        if name in self.copied:
            return address
        self.copied.add(name)
        path = ROOT / name
        up = "../" * address.count("/")
        if path.is_dir():
            inside = [f for f in sorted(self.files) if f.startswith(name.rstrip("/") + "/")]
            body = "".join(f'<a href="{up}{self.copy(f)}">{html.escape(f)}</a>\n' for f in inside)
        elif path.suffix == ".csv":
            rows = [[html.escape(cell) for cell in row] for row in csv.reader(path.open(encoding="utf-8", newline=""))]
            body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>\n" for row in rows)
        else:
            body = html.escape(path.read_text())
        block = "table" if path.suffix == ".csv" else "pre"
        target = self.folder / "html" / address
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
                          f'<meta name="viewport" content="width=device-width, initial-scale=1">'
                          f"<title>{html.escape(name)}</title></head>\n"
                          f'<body><a href="{up}index.html">hasten</a><h3>{html.escape(name)}</h3><{block}>{body}</{block}></body></html>\n')
        return address

    def target(self, page, link, fragment):
        """What Doxygen needs for a link of `page`."""
        if not link:
            return f"@ref {page_id(page)}--{fragment}"
        name = os.path.normpath(os.path.join(os.path.dirname(page), urllib.parse.unquote(link)))
        if name in self.pages:
            return f"@ref {page_id(name)}" + (f"--{fragment}" if fragment else "")
        if name in self.headers:
            return f"@ref {name.removeprefix('include/')}"
        if not (ROOT / name).exists():
            sys.exit(f"{page}: links to {link}, which is not there")
        return self.copy(name)

    def link(self, page, match):
        picture, text, link, fragment = match.groups()
        if picture:
            name = os.path.normpath(os.path.join(os.path.dirname(page), link))
            target = self.folder / "html" / os.path.basename(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
            return f'<img src="{target.name}" alt="{html.escape(text)}">'
        return f"[{text}]({self.target(page, link, fragment)})"

    def text(self, page, text, seen):
        """Text between blocks of code: its links, and labels for its headings."""
        code = [match.span() for match in CODE.finditer(text)]
        pieces, at = [], 0
        for match in LINK.finditer(text):
            if not any(start < match.start() < end for start, end in code):
                pieces += [text[at : match.start()], self.link(page, match)]
                at = match.end()
        return re.sub(r"^(#+) (.*)$", lambda m: self.heading(page, m, seen), "".join(pieces) + text[at:], flags=re.M)

    def heading(self, page, match, seen):
        slug = heading_slug(match[2])
        seen[slug] = seen.get(slug, -1) + 1
        slug += f"-{seen[slug]}" if seen[slug] else ""
        label = page_id(page) if len(match[1]) == 1 else f"{page_id(page)}--{slug}"
        return match[0] if label == "index" else f"{match[0]} {{#{label}}}"

    def page(self, name):
        """Text and blocks of code in turns; a block is a fence, or lines that are indented by 4."""
        pieces = re.split(r"(^```.*?^```$|(?:^    [^\n]*\n)+)", (ROOT / name).read_text(), flags=re.M | re.S)
        seen = {}
        for i, piece in enumerate(pieces):
            if i % 2 == 0:
                pieces[i] = self.text(name, piece, seen)
            elif piece.startswith("```diff"):
                pieces[i] = self.diff(piece)
            else:
                pieces[i] = re.sub(r"^```(\w+)", lambda m: "```" + LANGUAGES.get(m[1], ""), piece)
        self.write(f"{page_id(name)}.md", "".join(pieces))

    @staticmethod
    def diff(block):
        colour = {"+": "<ins>{}</ins>", "-": "<del>{}</del>"}
        lines = [colour.get(line[:1], "{}").format(html.escape(line)) for line in block.splitlines()[1:-1]]
        return '@htmlonly[block]<pre class="fragment diff">' + "\n".join(lines) + "</pre>@endhtmlonly"

    def header(self, name):
        """A header whose first comment is the file's."""
        text = (ROOT / name).read_text()
        first, pragma, rest = text.partition("#pragma once\n")
        if pragma:
            text = re.sub(r"^//(?!/)", "///", first, flags=re.M) + "/// @file\n" + rest
        self.write(name, re.sub(r"(?:^ *///.*\n)+", lambda m: self.comment(m[0]), text, flags=re.M))

    def comment(self, block):
        """A comment in which inset lines keep their layout, and lines that were broken early are
        lines."""
        lines = [line.partition("///") for line in block.splitlines()]
        result, inset, listed = [], False, False
        for (indent, slashes, line), (_, _, below) in zip(lines, [*lines[1:], ("", "", "")]):
            depth, text = len(line) - len(line.lstrip()), line.strip()
            listed = text[:2] in ("* ", "- ") or (listed and depth > 1)
            now = depth > 1 and not listed
            if now != inset:
                result.append(indent + slashes)  # around code
            inset = now
            if inset:
                line = "    " + line
            else:
                line = re.sub(r"\bdocs/[\w/-]+\.md\b", lambda m: f"@ref {page_id(m[0])}", line)
                room = WIDTH - len(indent) - len(slashes) - len(line) - 1
                if text and below[:2].strip() and text != "@file" and len(below.split()[0]) <= room:
                    line += " <br>"
            result.append(indent + slashes + line)
        return "\n".join(result) + "\n"

    def write(self, name, text):
        target = self.folder / "input" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def layout(self):
        """A layout with the sections of docs/README.md in the side bar."""
        groups, title, unseen = [], "About", set(self.pages) - {MAIN, START}
        for line in (ROOT / START).read_text().splitlines():
            if line.startswith("## "):
                title = line[3:]
            elif match := re.match(r"- \[([^\]]*)\]\(([^)#]*\.md)\)", line):
                name = os.path.normpath(os.path.join("docs", match[2]))
                if name == MAIN:
                    continue
                unseen.discard(name)
                if not groups or groups[-1][0] != title:
                    groups.append((title, []))
                groups[-1][1].append((match[1], name))
        for name in sorted(unseen):  # of the top folder
            title = (ROOT / name).read_text().splitlines()[0].removeprefix("# ")
            groups[0][1].append((title, name))
        tabs = '<tab type="user" url="@ref documentation" title="All pages"/>\n'
        for title, entries in groups[1:] + groups[:1]:
            inner = "".join(f'<tab type="user" url="@ref {page_id(n)}" title="{t}"/>\n' for t, n in entries)
            tabs += f'<tab type="usergroup" title="{title}">\n{inner}</tab>\n'
        (self.folder / "layout.xml").write_text(LAYOUT.format(tabs))


class Names:
    """Where the reference describes a name; from Doxygen's tag file."""

    def __init__(self, tag_file):
        self.address, self.bases = {}, {}
        for compound in ElementTree.parse(tag_file).getroot():
            if compound.get("kind") not in ("class", "struct", "namespace"):
                continue
            owner = compound.findtext("name").removeprefix("hasten").removeprefix("::")
            prefix = f"{owner}::" if owner else ""
            if owner:
                self.address[owner] = compound.findtext("filename")
            self.bases[owner] = [base.text.removeprefix("hasten::") for base in compound.findall("base")]
            for member in compound.findall("member"):
                place = member.findtext("anchorfile"), member.findtext("anchor")
                self.address.setdefault(prefix + member.findtext("name"), "#".join(place))
                for value in member.findall("enumvalue"):
                    place = value.get("file"), value.get("anchor")
                    self.address.setdefault(f"{prefix}{member.findtext('name')}::{value.text}", "#".join(place))

    def find(self, name):
        """Also in base classes. Plain words are not looked up: they may be any language's."""
        if not re.search(r"[A-Z_]", name):
            return None
        owner, _, member = name.rpartition("::")
        found = self.address.get(name) or self.address.get(f"{owner}Impl::{member}")
        return found or next(filter(None, (self.find(f"{base}::{member}") for base in self.bases.get(owner, ()))), None)

    def link(self, page):
        """Makes links of the names of the reference in a page of the documentation."""
        code = r"<a\b[^>]*>.*?</a>|<code>([\w:]+)(?:\(\))?</code>"
        if "coming-from" in page.name:  # the first column is another library's
            code = r"<tr[^>]*>\s*<td[^>]*>.*?</td>|" + code

        def linked(match):
            address = match[1] and self.find(match[1].removeprefix("hasten::"))
            return f'<a class="el" href="{address}">{match[0]}</a>' if address else match[0]

        page.write_text(re.sub(code, linked, page.read_text()))


def index_headings(folder):
    """Adds each word of the pages' headings to the search, which knows only how titles begin."""
    letters = re.search(r'0: "([^"]*)"', (folder / "html/search/searchdata.js").read_text())[1]
    entries = collections.defaultdict(list)
    for page in sorted((folder / "input").glob("*.md")):
        title = None
        for heading, label in re.findall(r"^#+ (.*?)(?: \{#(\S+)\})?$", page.read_text(), flags=re.M):
            words = set(re.findall(r"[a-z][a-z0-9]{2,}", re.sub(r"'s?\b", "", heading).lower())) - UNSEARCHED
            heading = html.escape(re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading))
            address = f"../{page.stem}.html" + (f"#{label}" if title else "")
            for word in words:
                entry = [f"{word}_p{page.stem}{label}", [heading, [address, 1, title or ""]]]
                entries[word[0]].append("  " + json.dumps(entry).replace("'", "&#39;").replace('"', "'"))
            title = title or heading
    for number, letter in enumerate(letters):
        path = folder / f"html/search/all_{number:x}.js"
        lines = [line.rstrip(",") for line in path.read_text().splitlines()[2:-1]]
        lines = [line for line in lines if "_8md.html" not in line] + entries[letter]
        path.write_text("var searchData=\n[\n" + ",\n".join(sorted(lines, key=str.lower)) + "\n];\n")


def dead_links(folder):
    """The links between pages that lead nowhere, as `page: link`."""
    anchors, links = {}, set()
    for path in sorted(folder.rglob("*.html")):
        text = path.read_text()
        anchors[path] = set(re.findall(r'\b(?:id|name)="([^"]+)"', text))
        links |= {(path, html.unescape(link)) for link in re.findall(r'<(?:a|img)\b[^>]*? (?:href|src)="([^"]*)"', text)}
    for path, link in sorted(links):
        address, _, fragment = link.partition("#")
        target = pathlib.Path(os.path.normpath(path.parent / urllib.parse.unquote(address))) if address else path
        # Doxygen heads the list of a class's nested classes only if one is public.
        if re.match(r"\w+:", link) or fragment in ("", "nested-classes") and not address:
            continue
        if not target.exists() or (fragment and target in anchors and fragment not in anchors[target]):
            yield f"{path.relative_to(folder)}: {link}"


def main():
    if sys.argv[1] == "--finish":
        folder = pathlib.Path(sys.argv[2])
        names = Names(folder / "hasten.tag")
        for page in (folder / "input").glob("*.md"):
            names.link(folder / "html" / f"{page.stem}.html")
        index_headings(folder)
        found = list(dead_links(folder / "html"))
        sys.exit("links that lead nowhere:\n" + "\n".join(found) if found else 0)
    folder = pathlib.Path(sys.argv[1])
    pages = Pages(folder)
    for name in pages.headers:
        pages.header(name)
    for name in pages.pages:
        pages.page(name)
    pages.layout()


if __name__ == "__main__":
    main()
