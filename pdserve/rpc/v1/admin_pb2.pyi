from pdserve.rpc.v1 import inference_pb2 as _inference_pb2
from pdserve.rpc.v1 import story_pb2 as _story_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
