package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * EngineControlService controls the engine of one worker. It is served by workers, on the admin address
 * only. Call each worker of a model separately.
 * One operation that changes the engine runs at a time; another one meanwhile ends with
 * FAILED_PRECONDITION (OPERATION_CONFLICT), except Undrain and Continue, which end a Drain or a Pause.
 * What the engine can't do ends with INVALID_ARGUMENT (UNSUPPORTED_FEATURE). Each call leaves one line
 * in the worker's log: who called, what, with what result. An operation whose caller goes away before it
 * has begun to change the engine is undone; later it is finished.
 * Operations that need an idle engine first take the worker out of service: its health turns
 * NOT_SERVING, it goes on accepting requests for a short time until routers have noticed, then refuses
 * new ones with UNAVAILABLE (WORKER_PAUSED), and waits until the open ones have ended.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class EngineControlServiceGrpc {

  private EngineControlServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.EngineControlService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.GetEngineStateRequest,
      io.millstream.v1.GetEngineStateResponse> getGetEngineStateMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetEngineState",
      requestType = io.millstream.v1.GetEngineStateRequest.class,
      responseType = io.millstream.v1.GetEngineStateResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.GetEngineStateRequest,
      io.millstream.v1.GetEngineStateResponse> getGetEngineStateMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.GetEngineStateRequest, io.millstream.v1.GetEngineStateResponse> getGetEngineStateMethod;
    if ((getGetEngineStateMethod = EngineControlServiceGrpc.getGetEngineStateMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getGetEngineStateMethod = EngineControlServiceGrpc.getGetEngineStateMethod) == null) {
          EngineControlServiceGrpc.getGetEngineStateMethod = getGetEngineStateMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.GetEngineStateRequest, io.millstream.v1.GetEngineStateResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetEngineState"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GetEngineStateRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GetEngineStateResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("GetEngineState"))
              .build();
        }
      }
    }
    return getGetEngineStateMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.DrainRequest,
      io.millstream.v1.DrainResponse> getDrainMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Drain",
      requestType = io.millstream.v1.DrainRequest.class,
      responseType = io.millstream.v1.DrainResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.DrainRequest,
      io.millstream.v1.DrainResponse> getDrainMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.DrainRequest, io.millstream.v1.DrainResponse> getDrainMethod;
    if ((getDrainMethod = EngineControlServiceGrpc.getDrainMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getDrainMethod = EngineControlServiceGrpc.getDrainMethod) == null) {
          EngineControlServiceGrpc.getDrainMethod = getDrainMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.DrainRequest, io.millstream.v1.DrainResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Drain"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.DrainRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.DrainResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("Drain"))
              .build();
        }
      }
    }
    return getDrainMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.UndrainRequest,
      io.millstream.v1.UndrainResponse> getUndrainMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Undrain",
      requestType = io.millstream.v1.UndrainRequest.class,
      responseType = io.millstream.v1.UndrainResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.UndrainRequest,
      io.millstream.v1.UndrainResponse> getUndrainMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.UndrainRequest, io.millstream.v1.UndrainResponse> getUndrainMethod;
    if ((getUndrainMethod = EngineControlServiceGrpc.getUndrainMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getUndrainMethod = EngineControlServiceGrpc.getUndrainMethod) == null) {
          EngineControlServiceGrpc.getUndrainMethod = getUndrainMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.UndrainRequest, io.millstream.v1.UndrainResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Undrain"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.UndrainRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.UndrainResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("Undrain"))
              .build();
        }
      }
    }
    return getUndrainMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.PauseRequest,
      io.millstream.v1.PauseResponse> getPauseMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Pause",
      requestType = io.millstream.v1.PauseRequest.class,
      responseType = io.millstream.v1.PauseResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.PauseRequest,
      io.millstream.v1.PauseResponse> getPauseMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.PauseRequest, io.millstream.v1.PauseResponse> getPauseMethod;
    if ((getPauseMethod = EngineControlServiceGrpc.getPauseMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getPauseMethod = EngineControlServiceGrpc.getPauseMethod) == null) {
          EngineControlServiceGrpc.getPauseMethod = getPauseMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.PauseRequest, io.millstream.v1.PauseResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Pause"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.PauseRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.PauseResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("Pause"))
              .build();
        }
      }
    }
    return getPauseMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.ContinueRequest,
      io.millstream.v1.ContinueResponse> getContinueMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Continue",
      requestType = io.millstream.v1.ContinueRequest.class,
      responseType = io.millstream.v1.ContinueResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.ContinueRequest,
      io.millstream.v1.ContinueResponse> getContinueMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.ContinueRequest, io.millstream.v1.ContinueResponse> getContinueMethod;
    if ((getContinueMethod = EngineControlServiceGrpc.getContinueMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getContinueMethod = EngineControlServiceGrpc.getContinueMethod) == null) {
          EngineControlServiceGrpc.getContinueMethod = getContinueMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.ContinueRequest, io.millstream.v1.ContinueResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Continue"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ContinueRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ContinueResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("Continue"))
              .build();
        }
      }
    }
    return getContinueMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.ReleaseMemoryRequest,
      io.millstream.v1.ReleaseMemoryResponse> getReleaseMemoryMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ReleaseMemory",
      requestType = io.millstream.v1.ReleaseMemoryRequest.class,
      responseType = io.millstream.v1.ReleaseMemoryResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.ReleaseMemoryRequest,
      io.millstream.v1.ReleaseMemoryResponse> getReleaseMemoryMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.ReleaseMemoryRequest, io.millstream.v1.ReleaseMemoryResponse> getReleaseMemoryMethod;
    if ((getReleaseMemoryMethod = EngineControlServiceGrpc.getReleaseMemoryMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getReleaseMemoryMethod = EngineControlServiceGrpc.getReleaseMemoryMethod) == null) {
          EngineControlServiceGrpc.getReleaseMemoryMethod = getReleaseMemoryMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.ReleaseMemoryRequest, io.millstream.v1.ReleaseMemoryResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ReleaseMemory"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ReleaseMemoryRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ReleaseMemoryResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("ReleaseMemory"))
              .build();
        }
      }
    }
    return getReleaseMemoryMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.ResumeMemoryRequest,
      io.millstream.v1.ResumeMemoryResponse> getResumeMemoryMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ResumeMemory",
      requestType = io.millstream.v1.ResumeMemoryRequest.class,
      responseType = io.millstream.v1.ResumeMemoryResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.ResumeMemoryRequest,
      io.millstream.v1.ResumeMemoryResponse> getResumeMemoryMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.ResumeMemoryRequest, io.millstream.v1.ResumeMemoryResponse> getResumeMemoryMethod;
    if ((getResumeMemoryMethod = EngineControlServiceGrpc.getResumeMemoryMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getResumeMemoryMethod = EngineControlServiceGrpc.getResumeMemoryMethod) == null) {
          EngineControlServiceGrpc.getResumeMemoryMethod = getResumeMemoryMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.ResumeMemoryRequest, io.millstream.v1.ResumeMemoryResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ResumeMemory"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ResumeMemoryRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ResumeMemoryResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("ResumeMemory"))
              .build();
        }
      }
    }
    return getResumeMemoryMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.UpdateWeightsRequest,
      io.millstream.v1.UpdateWeightsResponse> getUpdateWeightsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "UpdateWeights",
      requestType = io.millstream.v1.UpdateWeightsRequest.class,
      responseType = io.millstream.v1.UpdateWeightsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.UpdateWeightsRequest,
      io.millstream.v1.UpdateWeightsResponse> getUpdateWeightsMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.UpdateWeightsRequest, io.millstream.v1.UpdateWeightsResponse> getUpdateWeightsMethod;
    if ((getUpdateWeightsMethod = EngineControlServiceGrpc.getUpdateWeightsMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getUpdateWeightsMethod = EngineControlServiceGrpc.getUpdateWeightsMethod) == null) {
          EngineControlServiceGrpc.getUpdateWeightsMethod = getUpdateWeightsMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.UpdateWeightsRequest, io.millstream.v1.UpdateWeightsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "UpdateWeights"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.UpdateWeightsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.UpdateWeightsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("UpdateWeights"))
              .build();
        }
      }
    }
    return getUpdateWeightsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.FlushCacheRequest,
      io.millstream.v1.FlushCacheResponse> getFlushCacheMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "FlushCache",
      requestType = io.millstream.v1.FlushCacheRequest.class,
      responseType = io.millstream.v1.FlushCacheResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.FlushCacheRequest,
      io.millstream.v1.FlushCacheResponse> getFlushCacheMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.FlushCacheRequest, io.millstream.v1.FlushCacheResponse> getFlushCacheMethod;
    if ((getFlushCacheMethod = EngineControlServiceGrpc.getFlushCacheMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getFlushCacheMethod = EngineControlServiceGrpc.getFlushCacheMethod) == null) {
          EngineControlServiceGrpc.getFlushCacheMethod = getFlushCacheMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.FlushCacheRequest, io.millstream.v1.FlushCacheResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "FlushCache"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.FlushCacheRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.FlushCacheResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("FlushCache"))
              .build();
        }
      }
    }
    return getFlushCacheMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.StartProfileRequest,
      io.millstream.v1.StartProfileResponse> getStartProfileMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "StartProfile",
      requestType = io.millstream.v1.StartProfileRequest.class,
      responseType = io.millstream.v1.StartProfileResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.StartProfileRequest,
      io.millstream.v1.StartProfileResponse> getStartProfileMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.StartProfileRequest, io.millstream.v1.StartProfileResponse> getStartProfileMethod;
    if ((getStartProfileMethod = EngineControlServiceGrpc.getStartProfileMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getStartProfileMethod = EngineControlServiceGrpc.getStartProfileMethod) == null) {
          EngineControlServiceGrpc.getStartProfileMethod = getStartProfileMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.StartProfileRequest, io.millstream.v1.StartProfileResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "StartProfile"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.StartProfileRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.StartProfileResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("StartProfile"))
              .build();
        }
      }
    }
    return getStartProfileMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.StopProfileRequest,
      io.millstream.v1.StopProfileResponse> getStopProfileMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "StopProfile",
      requestType = io.millstream.v1.StopProfileRequest.class,
      responseType = io.millstream.v1.StopProfileResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.StopProfileRequest,
      io.millstream.v1.StopProfileResponse> getStopProfileMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.StopProfileRequest, io.millstream.v1.StopProfileResponse> getStopProfileMethod;
    if ((getStopProfileMethod = EngineControlServiceGrpc.getStopProfileMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getStopProfileMethod = EngineControlServiceGrpc.getStopProfileMethod) == null) {
          EngineControlServiceGrpc.getStopProfileMethod = getStopProfileMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.StopProfileRequest, io.millstream.v1.StopProfileResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "StopProfile"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.StopProfileRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.StopProfileResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("StopProfile"))
              .build();
        }
      }
    }
    return getStopProfileMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.LoadLoraRequest,
      io.millstream.v1.LoadLoraResponse> getLoadLoraMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "LoadLora",
      requestType = io.millstream.v1.LoadLoraRequest.class,
      responseType = io.millstream.v1.LoadLoraResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.LoadLoraRequest,
      io.millstream.v1.LoadLoraResponse> getLoadLoraMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.LoadLoraRequest, io.millstream.v1.LoadLoraResponse> getLoadLoraMethod;
    if ((getLoadLoraMethod = EngineControlServiceGrpc.getLoadLoraMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getLoadLoraMethod = EngineControlServiceGrpc.getLoadLoraMethod) == null) {
          EngineControlServiceGrpc.getLoadLoraMethod = getLoadLoraMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.LoadLoraRequest, io.millstream.v1.LoadLoraResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "LoadLora"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.LoadLoraRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.LoadLoraResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("LoadLora"))
              .build();
        }
      }
    }
    return getLoadLoraMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.UnloadLoraRequest,
      io.millstream.v1.UnloadLoraResponse> getUnloadLoraMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "UnloadLora",
      requestType = io.millstream.v1.UnloadLoraRequest.class,
      responseType = io.millstream.v1.UnloadLoraResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.UnloadLoraRequest,
      io.millstream.v1.UnloadLoraResponse> getUnloadLoraMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.UnloadLoraRequest, io.millstream.v1.UnloadLoraResponse> getUnloadLoraMethod;
    if ((getUnloadLoraMethod = EngineControlServiceGrpc.getUnloadLoraMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getUnloadLoraMethod = EngineControlServiceGrpc.getUnloadLoraMethod) == null) {
          EngineControlServiceGrpc.getUnloadLoraMethod = getUnloadLoraMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.UnloadLoraRequest, io.millstream.v1.UnloadLoraResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "UnloadLora"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.UnloadLoraRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.UnloadLoraResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("UnloadLora"))
              .build();
        }
      }
    }
    return getUnloadLoraMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.ListLorasRequest,
      io.millstream.v1.ListLorasResponse> getListLorasMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListLoras",
      requestType = io.millstream.v1.ListLorasRequest.class,
      responseType = io.millstream.v1.ListLorasResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.ListLorasRequest,
      io.millstream.v1.ListLorasResponse> getListLorasMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.ListLorasRequest, io.millstream.v1.ListLorasResponse> getListLorasMethod;
    if ((getListLorasMethod = EngineControlServiceGrpc.getListLorasMethod) == null) {
      synchronized (EngineControlServiceGrpc.class) {
        if ((getListLorasMethod = EngineControlServiceGrpc.getListLorasMethod) == null) {
          EngineControlServiceGrpc.getListLorasMethod = getListLorasMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.ListLorasRequest, io.millstream.v1.ListLorasResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListLoras"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ListLorasRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.ListLorasResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EngineControlServiceMethodDescriptorSupplier("ListLoras"))
              .build();
        }
      }
    }
    return getListLorasMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static EngineControlServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EngineControlServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EngineControlServiceStub>() {
        @java.lang.Override
        public EngineControlServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EngineControlServiceStub(channel, callOptions);
        }
      };
    return EngineControlServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static EngineControlServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EngineControlServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EngineControlServiceBlockingStub>() {
        @java.lang.Override
        public EngineControlServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EngineControlServiceBlockingStub(channel, callOptions);
        }
      };
    return EngineControlServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static EngineControlServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EngineControlServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EngineControlServiceFutureStub>() {
        @java.lang.Override
        public EngineControlServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EngineControlServiceFutureStub(channel, callOptions);
        }
      };
    return EngineControlServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * EngineControlService controls the engine of one worker. It is served by workers, on the admin address
   * only. Call each worker of a model separately.
   * One operation that changes the engine runs at a time; another one meanwhile ends with
   * FAILED_PRECONDITION (OPERATION_CONFLICT), except Undrain and Continue, which end a Drain or a Pause.
   * What the engine can't do ends with INVALID_ARGUMENT (UNSUPPORTED_FEATURE). Each call leaves one line
   * in the worker's log: who called, what, with what result. An operation whose caller goes away before it
   * has begun to change the engine is undone; later it is finished.
   * Operations that need an idle engine first take the worker out of service: its health turns
   * NOT_SERVING, it goes on accepting requests for a short time until routers have noticed, then refuses
   * new ones with UNAVAILABLE (WORKER_PAUSED), and waits until the open ones have ended.
   * </pre>
   */
  public static abstract class EngineControlServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * GetEngineState returns what operations have set.
     * </pre>
     */
    public void getEngineState(io.millstream.v1.GetEngineStateRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.GetEngineStateResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetEngineStateMethod(), responseObserver);
    }

    /**
     * <pre>
     * Drain takes the worker out of service, and ends when no request is open. The worker stays out of
     * service until Undrain; it doesn't exit. Called again, it waits, too. If requests are still open
     * after `timeout`, it ends with DEADLINE_EXCEEDED and the worker stays out of service.
     * </pre>
     */
    public void drain(io.millstream.v1.DrainRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.DrainResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getDrainMethod(), responseObserver);
    }

    /**
     * <pre>
     * Undrain puts the worker back into service. No effect when it is in service.
     * </pre>
     */
    public void undrain(io.millstream.v1.UndrainRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.UndrainResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getUndrainMethod(), responseObserver);
    }

    /**
     * <pre>
     * Pause stops the engine's steps. Health turns NOT_SERVING, so that routers use other workers; this is
     * no fault of the engine, and isn't reported as one. No effect when it is paused.
     * </pre>
     */
    public void pause(io.millstream.v1.PauseRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.PauseResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getPauseMethod(), responseObserver);
    }

    /**
     * <pre>
     * Continue lets the engine's steps go on. No effect when they do.
     * </pre>
     */
    public void continue_(io.millstream.v1.ContinueRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ContinueResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getContinueMethod(), responseObserver);
    }

    /**
     * <pre>
     * ReleaseMemory takes the worker out of service, waits until no request is open, and lets the engine
     * give memory back. The worker stays out of service until ResumeMemory. Released tags have no effect a
     * second time. If requests are still open after `timeout`, nothing is released and the worker is back
     * in service: DEADLINE_EXCEEDED.
     * </pre>
     */
    public void releaseMemory(io.millstream.v1.ReleaseMemoryRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ReleaseMemoryResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getReleaseMemoryMethod(), responseObserver);
    }

    /**
     * <pre>
     * ResumeMemory takes memory again, and puts the worker back into service once nothing is
     * released. No effect when nothing is.
     * </pre>
     */
    public void resumeMemory(io.millstream.v1.ResumeMemoryRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ResumeMemoryResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getResumeMemoryMethod(), responseObserver);
    }

    /**
     * <pre>
     * UpdateWeights replaces the model's weights. The first message is `start`; for a source of TENSORS
     * the caller then sends them and closes its side. Weights are checked before the engine is touched; if
     * they don't fit (names, shapes, types, incomplete files), the call ends with FAILED_PRECONDITION
     * (INVALID_WEIGHTS), and the old ones serve on. Then the worker goes out of service, open requests end
     * with the old weights, the weights are replaced, the KV cache is flushed, and the worker is back in
     * service: each request runs on exactly one version, which its answer names. In a model with prefill
     * and decode workers update all of them; requests are only handed off between equal versions.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.UpdateWeightsRequest> updateWeights(
        io.grpc.stub.StreamObserver<io.millstream.v1.UpdateWeightsResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getUpdateWeightsMethod(), responseObserver);
    }

    /**
     * <pre>
     * FlushCache empties the prefix cache. It needs an idle engine: while requests are open it ends with
     * FAILED_PRECONDITION (ENGINE_BUSY), unless `drain` is set.
     * </pre>
     */
    public void flushCache(io.millstream.v1.FlushCacheRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.FlushCacheResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getFlushCacheMethod(), responseObserver);
    }

    /**
     * <pre>
     * StartProfile begins to record what the engine does, into files on the worker's machine. While it
     * records, another one ends with FAILED_PRECONDITION (OPERATION_CONFLICT).
     * </pre>
     */
    public void startProfile(io.millstream.v1.StartProfileRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.StartProfileResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getStartProfileMethod(), responseObserver);
    }

    /**
     * <pre>
     * StopProfile ends the recording and names the files. If nothing is recorded it ends with
     * FAILED_PRECONDITION.
     * </pre>
     */
    public void stopProfile(io.millstream.v1.StopProfileRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.StopProfileResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getStopProfileMethod(), responseObserver);
    }

    /**
     * <pre>
     * LoadLora loads a LoRA adapter, which requests may then name. In a model with prefill and decode
     * workers load it on all of them. A name that is loaded already ends with ALREADY_EXISTS; files that
     * aren't an adapter for this model with FAILED_PRECONDITION (INVALID_WEIGHTS).
     * </pre>
     */
    public void loadLora(io.millstream.v1.LoadLoraRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.LoadLoraResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getLoadLoraMethod(), responseObserver);
    }

    /**
     * <pre>
     * UnloadLora removes an adapter: new requests that name it are refused at once, running ones end
     * first. A name that isn't loaded ends with NOT_FOUND (ADAPTER_NOT_FOUND).
     * </pre>
     */
    public void unloadLora(io.millstream.v1.UnloadLoraRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.UnloadLoraResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getUnloadLoraMethod(), responseObserver);
    }

    /**
     * <pre>
     * ListLoras lists the loaded adapters.
     * </pre>
     */
    public void listLoras(io.millstream.v1.ListLorasRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ListLorasResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListLorasMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getGetEngineStateMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.GetEngineStateRequest,
                io.millstream.v1.GetEngineStateResponse>(
                  this, METHODID_GET_ENGINE_STATE)))
          .addMethod(
            getDrainMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.DrainRequest,
                io.millstream.v1.DrainResponse>(
                  this, METHODID_DRAIN)))
          .addMethod(
            getUndrainMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.UndrainRequest,
                io.millstream.v1.UndrainResponse>(
                  this, METHODID_UNDRAIN)))
          .addMethod(
            getPauseMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.PauseRequest,
                io.millstream.v1.PauseResponse>(
                  this, METHODID_PAUSE)))
          .addMethod(
            getContinueMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.ContinueRequest,
                io.millstream.v1.ContinueResponse>(
                  this, METHODID_CONTINUE)))
          .addMethod(
            getReleaseMemoryMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.ReleaseMemoryRequest,
                io.millstream.v1.ReleaseMemoryResponse>(
                  this, METHODID_RELEASE_MEMORY)))
          .addMethod(
            getResumeMemoryMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.ResumeMemoryRequest,
                io.millstream.v1.ResumeMemoryResponse>(
                  this, METHODID_RESUME_MEMORY)))
          .addMethod(
            getUpdateWeightsMethod(),
            io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
              new MethodHandlers<
                io.millstream.v1.UpdateWeightsRequest,
                io.millstream.v1.UpdateWeightsResponse>(
                  this, METHODID_UPDATE_WEIGHTS)))
          .addMethod(
            getFlushCacheMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.FlushCacheRequest,
                io.millstream.v1.FlushCacheResponse>(
                  this, METHODID_FLUSH_CACHE)))
          .addMethod(
            getStartProfileMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.StartProfileRequest,
                io.millstream.v1.StartProfileResponse>(
                  this, METHODID_START_PROFILE)))
          .addMethod(
            getStopProfileMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.StopProfileRequest,
                io.millstream.v1.StopProfileResponse>(
                  this, METHODID_STOP_PROFILE)))
          .addMethod(
            getLoadLoraMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.LoadLoraRequest,
                io.millstream.v1.LoadLoraResponse>(
                  this, METHODID_LOAD_LORA)))
          .addMethod(
            getUnloadLoraMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.UnloadLoraRequest,
                io.millstream.v1.UnloadLoraResponse>(
                  this, METHODID_UNLOAD_LORA)))
          .addMethod(
            getListLorasMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.ListLorasRequest,
                io.millstream.v1.ListLorasResponse>(
                  this, METHODID_LIST_LORAS)))
          .build();
    }
  }

  /**
   * <pre>
   * EngineControlService controls the engine of one worker. It is served by workers, on the admin address
   * only. Call each worker of a model separately.
   * One operation that changes the engine runs at a time; another one meanwhile ends with
   * FAILED_PRECONDITION (OPERATION_CONFLICT), except Undrain and Continue, which end a Drain or a Pause.
   * What the engine can't do ends with INVALID_ARGUMENT (UNSUPPORTED_FEATURE). Each call leaves one line
   * in the worker's log: who called, what, with what result. An operation whose caller goes away before it
   * has begun to change the engine is undone; later it is finished.
   * Operations that need an idle engine first take the worker out of service: its health turns
   * NOT_SERVING, it goes on accepting requests for a short time until routers have noticed, then refuses
   * new ones with UNAVAILABLE (WORKER_PAUSED), and waits until the open ones have ended.
   * </pre>
   */
  public static final class EngineControlServiceStub extends io.grpc.stub.AbstractAsyncStub<EngineControlServiceStub> {
    private EngineControlServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EngineControlServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EngineControlServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetEngineState returns what operations have set.
     * </pre>
     */
    public void getEngineState(io.millstream.v1.GetEngineStateRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.GetEngineStateResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetEngineStateMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Drain takes the worker out of service, and ends when no request is open. The worker stays out of
     * service until Undrain; it doesn't exit. Called again, it waits, too. If requests are still open
     * after `timeout`, it ends with DEADLINE_EXCEEDED and the worker stays out of service.
     * </pre>
     */
    public void drain(io.millstream.v1.DrainRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.DrainResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getDrainMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Undrain puts the worker back into service. No effect when it is in service.
     * </pre>
     */
    public void undrain(io.millstream.v1.UndrainRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.UndrainResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getUndrainMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Pause stops the engine's steps. Health turns NOT_SERVING, so that routers use other workers; this is
     * no fault of the engine, and isn't reported as one. No effect when it is paused.
     * </pre>
     */
    public void pause(io.millstream.v1.PauseRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.PauseResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getPauseMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Continue lets the engine's steps go on. No effect when they do.
     * </pre>
     */
    public void continue_(io.millstream.v1.ContinueRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ContinueResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getContinueMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * ReleaseMemory takes the worker out of service, waits until no request is open, and lets the engine
     * give memory back. The worker stays out of service until ResumeMemory. Released tags have no effect a
     * second time. If requests are still open after `timeout`, nothing is released and the worker is back
     * in service: DEADLINE_EXCEEDED.
     * </pre>
     */
    public void releaseMemory(io.millstream.v1.ReleaseMemoryRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ReleaseMemoryResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getReleaseMemoryMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * ResumeMemory takes memory again, and puts the worker back into service once nothing is
     * released. No effect when nothing is.
     * </pre>
     */
    public void resumeMemory(io.millstream.v1.ResumeMemoryRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ResumeMemoryResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getResumeMemoryMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * UpdateWeights replaces the model's weights. The first message is `start`; for a source of TENSORS
     * the caller then sends them and closes its side. Weights are checked before the engine is touched; if
     * they don't fit (names, shapes, types, incomplete files), the call ends with FAILED_PRECONDITION
     * (INVALID_WEIGHTS), and the old ones serve on. Then the worker goes out of service, open requests end
     * with the old weights, the weights are replaced, the KV cache is flushed, and the worker is back in
     * service: each request runs on exactly one version, which its answer names. In a model with prefill
     * and decode workers update all of them; requests are only handed off between equal versions.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.millstream.v1.UpdateWeightsRequest> updateWeights(
        io.grpc.stub.StreamObserver<io.millstream.v1.UpdateWeightsResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getUpdateWeightsMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * FlushCache empties the prefix cache. It needs an idle engine: while requests are open it ends with
     * FAILED_PRECONDITION (ENGINE_BUSY), unless `drain` is set.
     * </pre>
     */
    public void flushCache(io.millstream.v1.FlushCacheRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.FlushCacheResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getFlushCacheMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * StartProfile begins to record what the engine does, into files on the worker's machine. While it
     * records, another one ends with FAILED_PRECONDITION (OPERATION_CONFLICT).
     * </pre>
     */
    public void startProfile(io.millstream.v1.StartProfileRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.StartProfileResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getStartProfileMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * StopProfile ends the recording and names the files. If nothing is recorded it ends with
     * FAILED_PRECONDITION.
     * </pre>
     */
    public void stopProfile(io.millstream.v1.StopProfileRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.StopProfileResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getStopProfileMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * LoadLora loads a LoRA adapter, which requests may then name. In a model with prefill and decode
     * workers load it on all of them. A name that is loaded already ends with ALREADY_EXISTS; files that
     * aren't an adapter for this model with FAILED_PRECONDITION (INVALID_WEIGHTS).
     * </pre>
     */
    public void loadLora(io.millstream.v1.LoadLoraRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.LoadLoraResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getLoadLoraMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * UnloadLora removes an adapter: new requests that name it are refused at once, running ones end
     * first. A name that isn't loaded ends with NOT_FOUND (ADAPTER_NOT_FOUND).
     * </pre>
     */
    public void unloadLora(io.millstream.v1.UnloadLoraRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.UnloadLoraResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getUnloadLoraMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * ListLoras lists the loaded adapters.
     * </pre>
     */
    public void listLoras(io.millstream.v1.ListLorasRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.ListLorasResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListLorasMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * <pre>
   * EngineControlService controls the engine of one worker. It is served by workers, on the admin address
   * only. Call each worker of a model separately.
   * One operation that changes the engine runs at a time; another one meanwhile ends with
   * FAILED_PRECONDITION (OPERATION_CONFLICT), except Undrain and Continue, which end a Drain or a Pause.
   * What the engine can't do ends with INVALID_ARGUMENT (UNSUPPORTED_FEATURE). Each call leaves one line
   * in the worker's log: who called, what, with what result. An operation whose caller goes away before it
   * has begun to change the engine is undone; later it is finished.
   * Operations that need an idle engine first take the worker out of service: its health turns
   * NOT_SERVING, it goes on accepting requests for a short time until routers have noticed, then refuses
   * new ones with UNAVAILABLE (WORKER_PAUSED), and waits until the open ones have ended.
   * </pre>
   */
  public static final class EngineControlServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<EngineControlServiceBlockingStub> {
    private EngineControlServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EngineControlServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EngineControlServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetEngineState returns what operations have set.
     * </pre>
     */
    public io.millstream.v1.GetEngineStateResponse getEngineState(io.millstream.v1.GetEngineStateRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetEngineStateMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Drain takes the worker out of service, and ends when no request is open. The worker stays out of
     * service until Undrain; it doesn't exit. Called again, it waits, too. If requests are still open
     * after `timeout`, it ends with DEADLINE_EXCEEDED and the worker stays out of service.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.DrainResponse> drain(
        io.millstream.v1.DrainRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getDrainMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Undrain puts the worker back into service. No effect when it is in service.
     * </pre>
     */
    public io.millstream.v1.UndrainResponse undrain(io.millstream.v1.UndrainRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getUndrainMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Pause stops the engine's steps. Health turns NOT_SERVING, so that routers use other workers; this is
     * no fault of the engine, and isn't reported as one. No effect when it is paused.
     * </pre>
     */
    public io.millstream.v1.PauseResponse pause(io.millstream.v1.PauseRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getPauseMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Continue lets the engine's steps go on. No effect when they do.
     * </pre>
     */
    public io.millstream.v1.ContinueResponse continue_(io.millstream.v1.ContinueRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getContinueMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * ReleaseMemory takes the worker out of service, waits until no request is open, and lets the engine
     * give memory back. The worker stays out of service until ResumeMemory. Released tags have no effect a
     * second time. If requests are still open after `timeout`, nothing is released and the worker is back
     * in service: DEADLINE_EXCEEDED.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.ReleaseMemoryResponse> releaseMemory(
        io.millstream.v1.ReleaseMemoryRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getReleaseMemoryMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * ResumeMemory takes memory again, and puts the worker back into service once nothing is
     * released. No effect when nothing is.
     * </pre>
     */
    public io.millstream.v1.ResumeMemoryResponse resumeMemory(io.millstream.v1.ResumeMemoryRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getResumeMemoryMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * FlushCache empties the prefix cache. It needs an idle engine: while requests are open it ends with
     * FAILED_PRECONDITION (ENGINE_BUSY), unless `drain` is set.
     * </pre>
     */
    public io.millstream.v1.FlushCacheResponse flushCache(io.millstream.v1.FlushCacheRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getFlushCacheMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * StartProfile begins to record what the engine does, into files on the worker's machine. While it
     * records, another one ends with FAILED_PRECONDITION (OPERATION_CONFLICT).
     * </pre>
     */
    public io.millstream.v1.StartProfileResponse startProfile(io.millstream.v1.StartProfileRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getStartProfileMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * StopProfile ends the recording and names the files. If nothing is recorded it ends with
     * FAILED_PRECONDITION.
     * </pre>
     */
    public io.millstream.v1.StopProfileResponse stopProfile(io.millstream.v1.StopProfileRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getStopProfileMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * LoadLora loads a LoRA adapter, which requests may then name. In a model with prefill and decode
     * workers load it on all of them. A name that is loaded already ends with ALREADY_EXISTS; files that
     * aren't an adapter for this model with FAILED_PRECONDITION (INVALID_WEIGHTS).
     * </pre>
     */
    public io.millstream.v1.LoadLoraResponse loadLora(io.millstream.v1.LoadLoraRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getLoadLoraMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * UnloadLora removes an adapter: new requests that name it are refused at once, running ones end
     * first. A name that isn't loaded ends with NOT_FOUND (ADAPTER_NOT_FOUND).
     * </pre>
     */
    public io.millstream.v1.UnloadLoraResponse unloadLora(io.millstream.v1.UnloadLoraRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getUnloadLoraMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * ListLoras lists the loaded adapters.
     * </pre>
     */
    public io.millstream.v1.ListLorasResponse listLoras(io.millstream.v1.ListLorasRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListLorasMethod(), getCallOptions(), request);
    }
  }

  /**
   * <pre>
   * EngineControlService controls the engine of one worker. It is served by workers, on the admin address
   * only. Call each worker of a model separately.
   * One operation that changes the engine runs at a time; another one meanwhile ends with
   * FAILED_PRECONDITION (OPERATION_CONFLICT), except Undrain and Continue, which end a Drain or a Pause.
   * What the engine can't do ends with INVALID_ARGUMENT (UNSUPPORTED_FEATURE). Each call leaves one line
   * in the worker's log: who called, what, with what result. An operation whose caller goes away before it
   * has begun to change the engine is undone; later it is finished.
   * Operations that need an idle engine first take the worker out of service: its health turns
   * NOT_SERVING, it goes on accepting requests for a short time until routers have noticed, then refuses
   * new ones with UNAVAILABLE (WORKER_PAUSED), and waits until the open ones have ended.
   * </pre>
   */
  public static final class EngineControlServiceFutureStub extends io.grpc.stub.AbstractFutureStub<EngineControlServiceFutureStub> {
    private EngineControlServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EngineControlServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EngineControlServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetEngineState returns what operations have set.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.GetEngineStateResponse> getEngineState(
        io.millstream.v1.GetEngineStateRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetEngineStateMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Undrain puts the worker back into service. No effect when it is in service.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.UndrainResponse> undrain(
        io.millstream.v1.UndrainRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getUndrainMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Pause stops the engine's steps. Health turns NOT_SERVING, so that routers use other workers; this is
     * no fault of the engine, and isn't reported as one. No effect when it is paused.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.PauseResponse> pause(
        io.millstream.v1.PauseRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getPauseMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Continue lets the engine's steps go on. No effect when they do.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.ContinueResponse> continue_(
        io.millstream.v1.ContinueRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getContinueMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * ResumeMemory takes memory again, and puts the worker back into service once nothing is
     * released. No effect when nothing is.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.ResumeMemoryResponse> resumeMemory(
        io.millstream.v1.ResumeMemoryRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getResumeMemoryMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * FlushCache empties the prefix cache. It needs an idle engine: while requests are open it ends with
     * FAILED_PRECONDITION (ENGINE_BUSY), unless `drain` is set.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.FlushCacheResponse> flushCache(
        io.millstream.v1.FlushCacheRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getFlushCacheMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * StartProfile begins to record what the engine does, into files on the worker's machine. While it
     * records, another one ends with FAILED_PRECONDITION (OPERATION_CONFLICT).
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.StartProfileResponse> startProfile(
        io.millstream.v1.StartProfileRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getStartProfileMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * StopProfile ends the recording and names the files. If nothing is recorded it ends with
     * FAILED_PRECONDITION.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.StopProfileResponse> stopProfile(
        io.millstream.v1.StopProfileRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getStopProfileMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * LoadLora loads a LoRA adapter, which requests may then name. In a model with prefill and decode
     * workers load it on all of them. A name that is loaded already ends with ALREADY_EXISTS; files that
     * aren't an adapter for this model with FAILED_PRECONDITION (INVALID_WEIGHTS).
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.LoadLoraResponse> loadLora(
        io.millstream.v1.LoadLoraRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getLoadLoraMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * UnloadLora removes an adapter: new requests that name it are refused at once, running ones end
     * first. A name that isn't loaded ends with NOT_FOUND (ADAPTER_NOT_FOUND).
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.UnloadLoraResponse> unloadLora(
        io.millstream.v1.UnloadLoraRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getUnloadLoraMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * ListLoras lists the loaded adapters.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.ListLorasResponse> listLoras(
        io.millstream.v1.ListLorasRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListLorasMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_GET_ENGINE_STATE = 0;
  private static final int METHODID_DRAIN = 1;
  private static final int METHODID_UNDRAIN = 2;
  private static final int METHODID_PAUSE = 3;
  private static final int METHODID_CONTINUE = 4;
  private static final int METHODID_RELEASE_MEMORY = 5;
  private static final int METHODID_RESUME_MEMORY = 6;
  private static final int METHODID_FLUSH_CACHE = 7;
  private static final int METHODID_START_PROFILE = 8;
  private static final int METHODID_STOP_PROFILE = 9;
  private static final int METHODID_LOAD_LORA = 10;
  private static final int METHODID_UNLOAD_LORA = 11;
  private static final int METHODID_LIST_LORAS = 12;
  private static final int METHODID_UPDATE_WEIGHTS = 13;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final EngineControlServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(EngineControlServiceImplBase serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_GET_ENGINE_STATE:
          serviceImpl.getEngineState((io.millstream.v1.GetEngineStateRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.GetEngineStateResponse>) responseObserver);
          break;
        case METHODID_DRAIN:
          serviceImpl.drain((io.millstream.v1.DrainRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.DrainResponse>) responseObserver);
          break;
        case METHODID_UNDRAIN:
          serviceImpl.undrain((io.millstream.v1.UndrainRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.UndrainResponse>) responseObserver);
          break;
        case METHODID_PAUSE:
          serviceImpl.pause((io.millstream.v1.PauseRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.PauseResponse>) responseObserver);
          break;
        case METHODID_CONTINUE:
          serviceImpl.continue_((io.millstream.v1.ContinueRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.ContinueResponse>) responseObserver);
          break;
        case METHODID_RELEASE_MEMORY:
          serviceImpl.releaseMemory((io.millstream.v1.ReleaseMemoryRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.ReleaseMemoryResponse>) responseObserver);
          break;
        case METHODID_RESUME_MEMORY:
          serviceImpl.resumeMemory((io.millstream.v1.ResumeMemoryRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.ResumeMemoryResponse>) responseObserver);
          break;
        case METHODID_FLUSH_CACHE:
          serviceImpl.flushCache((io.millstream.v1.FlushCacheRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.FlushCacheResponse>) responseObserver);
          break;
        case METHODID_START_PROFILE:
          serviceImpl.startProfile((io.millstream.v1.StartProfileRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.StartProfileResponse>) responseObserver);
          break;
        case METHODID_STOP_PROFILE:
          serviceImpl.stopProfile((io.millstream.v1.StopProfileRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.StopProfileResponse>) responseObserver);
          break;
        case METHODID_LOAD_LORA:
          serviceImpl.loadLora((io.millstream.v1.LoadLoraRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.LoadLoraResponse>) responseObserver);
          break;
        case METHODID_UNLOAD_LORA:
          serviceImpl.unloadLora((io.millstream.v1.UnloadLoraRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.UnloadLoraResponse>) responseObserver);
          break;
        case METHODID_LIST_LORAS:
          serviceImpl.listLoras((io.millstream.v1.ListLorasRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.ListLorasResponse>) responseObserver);
          break;
        default:
          throw new AssertionError();
      }
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public io.grpc.stub.StreamObserver<Req> invoke(
        io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_UPDATE_WEIGHTS:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.updateWeights(
              (io.grpc.stub.StreamObserver<io.millstream.v1.UpdateWeightsResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class EngineControlServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    EngineControlServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.EngineControlProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("EngineControlService");
    }
  }

  private static final class EngineControlServiceFileDescriptorSupplier
      extends EngineControlServiceBaseDescriptorSupplier {
    EngineControlServiceFileDescriptorSupplier() {}
  }

  private static final class EngineControlServiceMethodDescriptorSupplier
      extends EngineControlServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    EngineControlServiceMethodDescriptorSupplier(String methodName) {
      this.methodName = methodName;
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.MethodDescriptor getMethodDescriptor() {
      return getServiceDescriptor().findMethodByName(methodName);
    }
  }

  private static volatile io.grpc.ServiceDescriptor serviceDescriptor;

  public static io.grpc.ServiceDescriptor getServiceDescriptor() {
    io.grpc.ServiceDescriptor result = serviceDescriptor;
    if (result == null) {
      synchronized (EngineControlServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new EngineControlServiceFileDescriptorSupplier())
              .addMethod(getGetEngineStateMethod())
              .addMethod(getDrainMethod())
              .addMethod(getUndrainMethod())
              .addMethod(getPauseMethod())
              .addMethod(getContinueMethod())
              .addMethod(getReleaseMemoryMethod())
              .addMethod(getResumeMemoryMethod())
              .addMethod(getUpdateWeightsMethod())
              .addMethod(getFlushCacheMethod())
              .addMethod(getStartProfileMethod())
              .addMethod(getStopProfileMethod())
              .addMethod(getLoadLoraMethod())
              .addMethod(getUnloadLoraMethod())
              .addMethod(getListLorasMethod())
              .build();
        }
      }
    }
    return result;
  }
}
