"""Stream one prompt over gRPC with the generated stubs.

python examples/grpc_client.py --address 127.0.0.1:50051 "The capital of France is"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc

from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc

TIMEOUT_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args(argv)
    request = inference_pb2.GenerateRequest(
        text=args.prompt,
        sampling=common_pb2.SamplingParams(max_tokens=args.max_tokens, temperature=0.0),
    )
    try:
        with grpc.insecure_channel(args.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return stream(stub, request)
    except grpc.RpcError as exc:  # the trailing metadata names the reason of the failure for programs
        print(f"failed: {exc.code().name}: {exc.details()}", file=sys.stderr)
        return 1


def stream(stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest) -> int:
    response = inference_pb2.GenerateResponse()
    for response in stub.Generate(request, timeout=TIMEOUT_S):
        print(response.text, end="", flush=True)
    if not response.finish_reason:
        print("failed: the stream ended early", file=sys.stderr)
        return 1
    report = response.report
    workers = " -> ".join(filter(None, (report.prefill_worker, report.decode_worker)))
    print(f"\n[{response.usage.output_tokens} tokens by {workers}, {report.kv_bytes} KV bytes moved]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
