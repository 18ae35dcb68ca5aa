"""What a pull will fetch, from any kind of source."""

from dataclasses import dataclass

from localllm.library.manifest import Layer
from localllm.library.names import ModelName
from localllm.library.web import Remote


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file to download. size: bytes.

    what: names the file in messages. digest: None if the host does not give it; then the ETag, if any, tells whether
    what arrived earlier belongs to the same file. key: names its partial download.
    """

    kind: str
    remote: Remote
    size: int
    what: str
    key: str
    digest: str | None

    def layer(self, digest: str) -> Layer:
        """The file as a layer of a manifest."""
        return Layer(self.kind, digest, self.size)


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A model's files, and the name to store it under. title: as in Manifest."""

    name: ModelName
    files: tuple[RemoteFile, ...]
    title: str | None = None
