"""Make calls with a service config by gRPC alone; `ExampleSuite.run` says what it reads."""

import os
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import processor_pb2, processor_pb2_grpc, sampling_pb2

config = Path(os.environ["MILLSTREAM_SERVICE_CONFIG"]).read_text()
key = [("authorization", f"Bearer {os.environ['MILLSTREAM_API_KEY']}")]
request = processor_pb2.CompleteRequest(
    model=os.environ["MILLSTREAM_MODEL"],
    text="Hello",
    options=processor_pb2.GenerationOptions(sampling=sampling_pb2.SamplingParams(max_new_tokens=1)),
)
target = f"ipv4:{os.environ['MILLSTREAM_ADDRESSES']}"
with grpc.insecure_channel(target, [("grpc.service_config", config)]) as channel:
    stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)  # type: ignore[arg-type]
    for _ in range(int(os.environ["MILLSTREAM_CALLS"])):
        list(stub.Complete(request, timeout=10, metadata=key))
