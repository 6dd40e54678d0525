"""SVG: well-formed whatever the text, and numbers that stay short."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from howdah.draw.svg import blend, document, element, hint, words

SVG = "{http://www.w3.org/2000/svg}"


def test_an_element_is_a_string():
    assert element("rect", x=1, y=2.5, fill="#fff") == '<rect x="1" y="2.5" fill="#fff"/>'
    assert element("g", element("rect"), hint("a")) == "<g><rect/><title>a</title></g>"


def test_names_with_hyphens():
    assert element("line", stroke_width=1) == '<line stroke-width="1"/>'


def test_numbers_are_cut_to_a_hundredth():
    assert element("rect", x=1 / 3, y=100.0, width=1234.5678) == (
        '<rect x="0.33" y="100" width="1234.57"/>'
    )


# XML has no place for control characters and lone surrogates.
WRITABLE = st.text(
    st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
)


@given(WRITABLE)
def test_any_text_comes_back(text):
    drawn = document(100, 20, words(1, 2, text, fill=text), element("rect", hint(text)))
    root = ElementTree.fromstring(drawn)
    said = root.find(f"{SVG}text")
    assert (said.text or "") == text
    assert said.get("fill") == text
    assert (root.find(f"{SVG}rect/{SVG}title").text or "") == text


def test_a_document_scales():
    root = ElementTree.fromstring(document(100.5, 20))
    assert root.tag == f"{SVG}svg"
    assert (root.get("viewBox"), root.get("width"), root.get("height")) == (
        "0 0 100.5 20",
        "100.5",
        "20",
    )


def test_colors_blend():
    assert blend("#000000", "#ffffff", 0.5) == "#808080"
    assert blend("#102030", "#ffffff", 0) == "#102030"
    assert blend("#102030", "#405060", 1) == "#405060"
