"""What a type checker knows of the stubs and of the client library; nobody runs it."""

from millstream.orca import load_report_pb2
from millstream.v1 import processor_pb2, processor_pb2_grpc
from millstream_client import Client


async def known(client: Client, stub: processor_pb2_grpc.ProcessorServiceStub) -> None:
    reveal_type(processor_pb2.CompleteRequest(model="m").model)
    reveal_type(load_report_pb2.OrcaLoadReport().cpu_utilization)
    reveal_type(stub.Complete(processor_pb2.CompleteRequest()))
    reveal_type((await client.chat("Hello").answer()).text)
    processor_pb2.CompleteRequest(modell="m")
