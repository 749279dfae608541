"""Generate the gRPC stubs in pdserve/rpc/v1 from proto/, or with --check fail when they are stale."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))
GENERATED = Path("pdserve/rpc/v1")


def generate(into: Path) -> None:
    """Generate the stubs under the folder `into`. Raises `SystemExit` when protoc fails."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    args = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    args += [f"--python_out={into}", f"--pyi_out={into}", f"--grpc_python_out={into}", *map(str, PROTOS)]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")
    for stub in (into / GENERATED).glob("*_pb2_grpc.py"):
        if not (ROOT / "proto" / GENERATED / stub.name.replace("_pb2_grpc.py", ".proto")).read_text().count("\nservice "):
            stub.unlink()  # protoc writes an empty stub for a file without a service


def stale() -> list[str]:
    """Return the names of generated files that differ from what proto/ gives today, or that nothing generates any more."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.name: p.read_bytes() for p in (Path(folder) / GENERATED).iterdir()}
    present = {p.name: p.read_bytes() for p in (ROOT / GENERATED).glob("*_pb2*")}
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if names := stale():
            raise SystemExit(f"stale stubs: {', '.join(names)}; run `make protos`")
        print("stubs are up to date")
    else:
        for old in (ROOT / GENERATED).glob("*_pb2*"):
            old.unlink()
        generate(ROOT)
