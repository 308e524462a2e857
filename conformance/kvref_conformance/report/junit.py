"""The JUnit file of a run: pytest writes it, and this module adds what pytest does not know."""

from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from kvref_conformance.results import Result
from kvref_conformance.runner.causes import probable_causes


def add_properties(path: Path, results: Iterable[Result]) -> None:
    """Add properties to the test cases of clauses: the verdict "xpassed", and the clause that shows the same fault first."""
    results = list(results)
    first = {clause: cause.first.clause for cause in probable_causes(results) for clause in cause.clauses}
    found = {each["clause"]: {"kvref.cause": first[each["clause"]]} for each in results if each["clause"] in first}
    found |= {each["clause"]: {"kvref.verdict": "xpassed"} for each in results if each["verdict"] == "xpassed"}
    tree = ElementTree.parse(path)
    for case in tree.iter("testcase"):
        if properties := found.get(case.get("name", "").partition("[")[0]):
            case.insert(0, element := ElementTree.Element("properties"))
            for name, value in properties.items():
                ElementTree.SubElement(element, "property", name=name, value=value)
    tree.write(path, encoding="utf-8", xml_declaration=True)
