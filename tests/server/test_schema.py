"""Schemathesis makes requests from the OpenAPI, valid and invalid: none ends in a server error.

`make test` sends a few to the routes with most arguments; `make test-slow` many to every route.
"""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.server.conftest import BASE, make_run
from xsake import shipped
from xsake.server.app import create_app
from xsake.server.settings import Limits, Settings

HOST = BASE.removeprefix("http://")
STREAM = "/api/runs/{name}/live"  # it does not end: test_live.py
OPERATIONS = [
    (path, method)
    for path, methods in create_app().openapi()["paths"].items()
    for method in methods
    if path != STREAM
]

# Names that exist, for requests that are valid but for a name that nothing has.
KNOWN = {
    "/api/runs/{name}": "a",
    "/api/profiles/{name}": shipped.PROFILES[0].stem,
    "/api/results/{name}": min(shipped.RESULTS.glob("cpu-*.json")).stem,
}


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    root = tmp_path_factory.mktemp("schema")
    make_run(root / "runs")
    # small limits: what is drawn and read is checked elsewhere
    limits = Limits(blocks=8, heads=2, text_characters=200)
    app = create_app(Settings(runs=(root / "runs",), limits=limits))
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": HOST})


MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def attempt(schema, path, method, examples, modes=MODES):
    """Sends requests to one route."""
    operation = schema[path][method]
    for mode in modes:
        known = KNOWN if mode == GenerationMode.POSITIVE else {}
        names = [name for start, name in known.items() if path.startswith(start)]

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode), names=st.just(names))
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def sent(case, names):
            for name in names:
                case.path_parameters["name"] = name
            answer = case.call(headers={"host": HOST})
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if "json" in str(answer.headers.get("content-type")):
                answer.json()

        try:
            sent()
        except hypothesis.errors.Unsatisfiable:
            assert mode == GenerationMode.NEGATIVE  # a route without arguments has no wrong ones


# Routes with most arguments; a text that is read compiles the model, so only wrong ones are sent.
FEW = {
    "/api/masks": MODES,
    "/api/profiles/{name}/plan": MODES,
    "/api/rows": MODES,
    "/api/runs/{name}/events": MODES,
    "/api/play/texts": MODES[1:],
}


@pytest.mark.parametrize(("path", "method"), [x for x in OPERATIONS if x[0] in FEW])
def test_no_request_ends_in_a_server_error(schema, path, method):
    attempt(schema, path, method, 5, FEW[path])


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_none_of_many_requests_ends_in_a_server_error(schema, path, method):
    attempt(schema, path, method, 100)
