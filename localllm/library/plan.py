"""What a pull is going to fetch, whoever has it."""

from dataclasses import dataclass

from localllm.library.manifest import Layer
from localllm.library.names import ModelName
from localllm.library.web import Remote


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file to come. size: bytes.

    what: the file in words. digest: None where the host does not tell it; then the ETag, if there is one, says whether
    what arrived earlier is still of the same file. key: names its partial download.
    """

    kind: str
    remote: Remote
    size: int
    what: str
    key: str
    digest: str | None

    def layer(self, digest: str) -> Layer:
        """The file as a manifest names it."""
        return Layer(self.kind, digest, self.size)


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A model's files, and the name under which it will be stored. title: as in Manifest."""

    name: ModelName
    files: tuple[RemoteFile, ...]
    title: str | None = None
