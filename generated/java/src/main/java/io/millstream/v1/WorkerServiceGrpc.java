package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * WorkerService describes a worker and reports its load. Every worker serves it besides its own
 * service.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class WorkerServiceGrpc {

  private WorkerServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.WorkerService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.GetWorkerInfoRequest,
      io.millstream.v1.GetWorkerInfoResponse> getGetWorkerInfoMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetWorkerInfo",
      requestType = io.millstream.v1.GetWorkerInfoRequest.class,
      responseType = io.millstream.v1.GetWorkerInfoResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.GetWorkerInfoRequest,
      io.millstream.v1.GetWorkerInfoResponse> getGetWorkerInfoMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.GetWorkerInfoRequest, io.millstream.v1.GetWorkerInfoResponse> getGetWorkerInfoMethod;
    if ((getGetWorkerInfoMethod = WorkerServiceGrpc.getGetWorkerInfoMethod) == null) {
      synchronized (WorkerServiceGrpc.class) {
        if ((getGetWorkerInfoMethod = WorkerServiceGrpc.getGetWorkerInfoMethod) == null) {
          WorkerServiceGrpc.getGetWorkerInfoMethod = getGetWorkerInfoMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.GetWorkerInfoRequest, io.millstream.v1.GetWorkerInfoResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetWorkerInfo"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GetWorkerInfoRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GetWorkerInfoResponse.getDefaultInstance()))
              .setSchemaDescriptor(new WorkerServiceMethodDescriptorSupplier("GetWorkerInfo"))
              .build();
        }
      }
    }
    return getGetWorkerInfoMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.WatchWorkerInfoRequest,
      io.millstream.v1.WatchWorkerInfoResponse> getWatchWorkerInfoMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "WatchWorkerInfo",
      requestType = io.millstream.v1.WatchWorkerInfoRequest.class,
      responseType = io.millstream.v1.WatchWorkerInfoResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.WatchWorkerInfoRequest,
      io.millstream.v1.WatchWorkerInfoResponse> getWatchWorkerInfoMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.WatchWorkerInfoRequest, io.millstream.v1.WatchWorkerInfoResponse> getWatchWorkerInfoMethod;
    if ((getWatchWorkerInfoMethod = WorkerServiceGrpc.getWatchWorkerInfoMethod) == null) {
      synchronized (WorkerServiceGrpc.class) {
        if ((getWatchWorkerInfoMethod = WorkerServiceGrpc.getWatchWorkerInfoMethod) == null) {
          WorkerServiceGrpc.getWatchWorkerInfoMethod = getWatchWorkerInfoMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.WatchWorkerInfoRequest, io.millstream.v1.WatchWorkerInfoResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "WatchWorkerInfo"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchWorkerInfoRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchWorkerInfoResponse.getDefaultInstance()))
              .setSchemaDescriptor(new WorkerServiceMethodDescriptorSupplier("WatchWorkerInfo"))
              .build();
        }
      }
    }
    return getWatchWorkerInfoMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.WatchLoadRequest,
      io.millstream.v1.WatchLoadResponse> getWatchLoadMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "WatchLoad",
      requestType = io.millstream.v1.WatchLoadRequest.class,
      responseType = io.millstream.v1.WatchLoadResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.WatchLoadRequest,
      io.millstream.v1.WatchLoadResponse> getWatchLoadMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.WatchLoadRequest, io.millstream.v1.WatchLoadResponse> getWatchLoadMethod;
    if ((getWatchLoadMethod = WorkerServiceGrpc.getWatchLoadMethod) == null) {
      synchronized (WorkerServiceGrpc.class) {
        if ((getWatchLoadMethod = WorkerServiceGrpc.getWatchLoadMethod) == null) {
          WorkerServiceGrpc.getWatchLoadMethod = getWatchLoadMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.WatchLoadRequest, io.millstream.v1.WatchLoadResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "WatchLoad"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchLoadRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchLoadResponse.getDefaultInstance()))
              .setSchemaDescriptor(new WorkerServiceMethodDescriptorSupplier("WatchLoad"))
              .build();
        }
      }
    }
    return getWatchLoadMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.WatchKvEventsRequest,
      io.millstream.v1.WatchKvEventsResponse> getWatchKvEventsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "WatchKvEvents",
      requestType = io.millstream.v1.WatchKvEventsRequest.class,
      responseType = io.millstream.v1.WatchKvEventsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.WatchKvEventsRequest,
      io.millstream.v1.WatchKvEventsResponse> getWatchKvEventsMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.WatchKvEventsRequest, io.millstream.v1.WatchKvEventsResponse> getWatchKvEventsMethod;
    if ((getWatchKvEventsMethod = WorkerServiceGrpc.getWatchKvEventsMethod) == null) {
      synchronized (WorkerServiceGrpc.class) {
        if ((getWatchKvEventsMethod = WorkerServiceGrpc.getWatchKvEventsMethod) == null) {
          WorkerServiceGrpc.getWatchKvEventsMethod = getWatchKvEventsMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.WatchKvEventsRequest, io.millstream.v1.WatchKvEventsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "WatchKvEvents"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchKvEventsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchKvEventsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new WorkerServiceMethodDescriptorSupplier("WatchKvEvents"))
              .build();
        }
      }
    }
    return getWatchKvEventsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.WatchLoadProgressRequest,
      io.millstream.v1.WatchLoadProgressResponse> getWatchLoadProgressMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "WatchLoadProgress",
      requestType = io.millstream.v1.WatchLoadProgressRequest.class,
      responseType = io.millstream.v1.WatchLoadProgressResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.millstream.v1.WatchLoadProgressRequest,
      io.millstream.v1.WatchLoadProgressResponse> getWatchLoadProgressMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.WatchLoadProgressRequest, io.millstream.v1.WatchLoadProgressResponse> getWatchLoadProgressMethod;
    if ((getWatchLoadProgressMethod = WorkerServiceGrpc.getWatchLoadProgressMethod) == null) {
      synchronized (WorkerServiceGrpc.class) {
        if ((getWatchLoadProgressMethod = WorkerServiceGrpc.getWatchLoadProgressMethod) == null) {
          WorkerServiceGrpc.getWatchLoadProgressMethod = getWatchLoadProgressMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.WatchLoadProgressRequest, io.millstream.v1.WatchLoadProgressResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "WatchLoadProgress"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchLoadProgressRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.WatchLoadProgressResponse.getDefaultInstance()))
              .setSchemaDescriptor(new WorkerServiceMethodDescriptorSupplier("WatchLoadProgress"))
              .build();
        }
      }
    }
    return getWatchLoadProgressMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static WorkerServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<WorkerServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<WorkerServiceStub>() {
        @java.lang.Override
        public WorkerServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new WorkerServiceStub(channel, callOptions);
        }
      };
    return WorkerServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static WorkerServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<WorkerServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<WorkerServiceBlockingStub>() {
        @java.lang.Override
        public WorkerServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new WorkerServiceBlockingStub(channel, callOptions);
        }
      };
    return WorkerServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static WorkerServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<WorkerServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<WorkerServiceFutureStub>() {
        @java.lang.Override
        public WorkerServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new WorkerServiceFutureStub(channel, callOptions);
        }
      };
    return WorkerServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * WorkerService describes a worker and reports its load. Every worker serves it besides its own
   * service.
   * </pre>
   */
  public static abstract class WorkerServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * GetWorkerInfo returns the worker's current info. Ends with UNAVAILABLE and RetryInfo until the
     * model is loaded, and with UNAVAILABLE and the reason WORKER_DRAINING when it shuts down.
     * </pre>
     */
    public void getWorkerInfo(io.millstream.v1.GetWorkerInfoRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.GetWorkerInfoResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetWorkerInfoMethod(), responseObserver);
    }

    /**
     * <pre>
     * WatchWorkerInfo reports the worker's info and its changes: the whole WorkerInfo at once (called
     * before the model is loaded, it waits for that), and again after each change. Every message
     * replaces the one before; of several changes in a row a slow reader MAY get the last one only.
     * When the worker begins to shut down the stream ends with UNAVAILABLE and the reason
     * WORKER_DRAINING: the caller MUST NOT start new requests there; running ones continue. Any other
     * end has no meaning for the worker's state. After a reconnect the first message is the full state
     * again; the caller MUST NOT assume that it describes the same process, unless worker_id is the same.
     * </pre>
     */
    public void watchWorkerInfo(io.millstream.v1.WatchWorkerInfoRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchWorkerInfoResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getWatchWorkerInfoMethod(), responseObserver);
    }

    /**
     * <pre>
     * WatchLoad pushes the worker's load: at once, whenever it changed at the end of an interval, and
     * every ten intervals even if it did not. The stream ends only with the worker or the caller; after
     * a reconnect the first message is the full state again.
     * </pre>
     */
    public void watchLoad(io.millstream.v1.WatchLoadRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchLoadResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getWatchLoadMethod(), responseObserver);
    }

    /**
     * <pre>
     * WatchKvEvents reports which KV blocks the worker's prefix cache holds, so that a caller can keep
     * an equal set and send requests where their prompt is cached. kv_events.proto states the rules. Only
     * for workers whose WorkerInfo.block_hashing is set; else it ends with INVALID_ARGUMENT and the
     * reason UNSUPPORTED_FEATURE. Ends with UNAVAILABLE and RetryInfo until the model is loaded.
     * </pre>
     */
    public void watchKvEvents(io.millstream.v1.WatchKvEventsRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchKvEventsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getWatchKvEventsMethod(), responseObserver);
    }

    /**
     * <pre>
     * WatchLoadProgress reports how far the model is loaded: the current state at once, then each
     * change, at most some per second. It is served before the worker is ready. It ends with OK after
     * the message with the stage READY; if the model can't be loaded it ends with UNAVAILABLE.
     * </pre>
     */
    public void watchLoadProgress(io.millstream.v1.WatchLoadProgressRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchLoadProgressResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getWatchLoadProgressMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getGetWorkerInfoMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.GetWorkerInfoRequest,
                io.millstream.v1.GetWorkerInfoResponse>(
                  this, METHODID_GET_WORKER_INFO)))
          .addMethod(
            getWatchWorkerInfoMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.WatchWorkerInfoRequest,
                io.millstream.v1.WatchWorkerInfoResponse>(
                  this, METHODID_WATCH_WORKER_INFO)))
          .addMethod(
            getWatchLoadMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.WatchLoadRequest,
                io.millstream.v1.WatchLoadResponse>(
                  this, METHODID_WATCH_LOAD)))
          .addMethod(
            getWatchKvEventsMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.WatchKvEventsRequest,
                io.millstream.v1.WatchKvEventsResponse>(
                  this, METHODID_WATCH_KV_EVENTS)))
          .addMethod(
            getWatchLoadProgressMethod(),
            io.grpc.stub.ServerCalls.asyncServerStreamingCall(
              new MethodHandlers<
                io.millstream.v1.WatchLoadProgressRequest,
                io.millstream.v1.WatchLoadProgressResponse>(
                  this, METHODID_WATCH_LOAD_PROGRESS)))
          .build();
    }
  }

  /**
   * <pre>
   * WorkerService describes a worker and reports its load. Every worker serves it besides its own
   * service.
   * </pre>
   */
  public static final class WorkerServiceStub extends io.grpc.stub.AbstractAsyncStub<WorkerServiceStub> {
    private WorkerServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected WorkerServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new WorkerServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetWorkerInfo returns the worker's current info. Ends with UNAVAILABLE and RetryInfo until the
     * model is loaded, and with UNAVAILABLE and the reason WORKER_DRAINING when it shuts down.
     * </pre>
     */
    public void getWorkerInfo(io.millstream.v1.GetWorkerInfoRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.GetWorkerInfoResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetWorkerInfoMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * WatchWorkerInfo reports the worker's info and its changes: the whole WorkerInfo at once (called
     * before the model is loaded, it waits for that), and again after each change. Every message
     * replaces the one before; of several changes in a row a slow reader MAY get the last one only.
     * When the worker begins to shut down the stream ends with UNAVAILABLE and the reason
     * WORKER_DRAINING: the caller MUST NOT start new requests there; running ones continue. Any other
     * end has no meaning for the worker's state. After a reconnect the first message is the full state
     * again; the caller MUST NOT assume that it describes the same process, unless worker_id is the same.
     * </pre>
     */
    public void watchWorkerInfo(io.millstream.v1.WatchWorkerInfoRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchWorkerInfoResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getWatchWorkerInfoMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * WatchLoad pushes the worker's load: at once, whenever it changed at the end of an interval, and
     * every ten intervals even if it did not. The stream ends only with the worker or the caller; after
     * a reconnect the first message is the full state again.
     * </pre>
     */
    public void watchLoad(io.millstream.v1.WatchLoadRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchLoadResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getWatchLoadMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * WatchKvEvents reports which KV blocks the worker's prefix cache holds, so that a caller can keep
     * an equal set and send requests where their prompt is cached. kv_events.proto states the rules. Only
     * for workers whose WorkerInfo.block_hashing is set; else it ends with INVALID_ARGUMENT and the
     * reason UNSUPPORTED_FEATURE. Ends with UNAVAILABLE and RetryInfo until the model is loaded.
     * </pre>
     */
    public void watchKvEvents(io.millstream.v1.WatchKvEventsRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchKvEventsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getWatchKvEventsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * WatchLoadProgress reports how far the model is loaded: the current state at once, then each
     * change, at most some per second. It is served before the worker is ready. It ends with OK after
     * the message with the stage READY; if the model can't be loaded it ends with UNAVAILABLE.
     * </pre>
     */
    public void watchLoadProgress(io.millstream.v1.WatchLoadProgressRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.WatchLoadProgressResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getWatchLoadProgressMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * <pre>
   * WorkerService describes a worker and reports its load. Every worker serves it besides its own
   * service.
   * </pre>
   */
  public static final class WorkerServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<WorkerServiceBlockingStub> {
    private WorkerServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected WorkerServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new WorkerServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetWorkerInfo returns the worker's current info. Ends with UNAVAILABLE and RetryInfo until the
     * model is loaded, and with UNAVAILABLE and the reason WORKER_DRAINING when it shuts down.
     * </pre>
     */
    public io.millstream.v1.GetWorkerInfoResponse getWorkerInfo(io.millstream.v1.GetWorkerInfoRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetWorkerInfoMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * WatchWorkerInfo reports the worker's info and its changes: the whole WorkerInfo at once (called
     * before the model is loaded, it waits for that), and again after each change. Every message
     * replaces the one before; of several changes in a row a slow reader MAY get the last one only.
     * When the worker begins to shut down the stream ends with UNAVAILABLE and the reason
     * WORKER_DRAINING: the caller MUST NOT start new requests there; running ones continue. Any other
     * end has no meaning for the worker's state. After a reconnect the first message is the full state
     * again; the caller MUST NOT assume that it describes the same process, unless worker_id is the same.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.WatchWorkerInfoResponse> watchWorkerInfo(
        io.millstream.v1.WatchWorkerInfoRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getWatchWorkerInfoMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * WatchLoad pushes the worker's load: at once, whenever it changed at the end of an interval, and
     * every ten intervals even if it did not. The stream ends only with the worker or the caller; after
     * a reconnect the first message is the full state again.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.WatchLoadResponse> watchLoad(
        io.millstream.v1.WatchLoadRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getWatchLoadMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * WatchKvEvents reports which KV blocks the worker's prefix cache holds, so that a caller can keep
     * an equal set and send requests where their prompt is cached. kv_events.proto states the rules. Only
     * for workers whose WorkerInfo.block_hashing is set; else it ends with INVALID_ARGUMENT and the
     * reason UNSUPPORTED_FEATURE. Ends with UNAVAILABLE and RetryInfo until the model is loaded.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.WatchKvEventsResponse> watchKvEvents(
        io.millstream.v1.WatchKvEventsRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getWatchKvEventsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * WatchLoadProgress reports how far the model is loaded: the current state at once, then each
     * change, at most some per second. It is served before the worker is ready. It ends with OK after
     * the message with the stage READY; if the model can't be loaded it ends with UNAVAILABLE.
     * </pre>
     */
    public java.util.Iterator<io.millstream.v1.WatchLoadProgressResponse> watchLoadProgress(
        io.millstream.v1.WatchLoadProgressRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getWatchLoadProgressMethod(), getCallOptions(), request);
    }
  }

  /**
   * <pre>
   * WorkerService describes a worker and reports its load. Every worker serves it besides its own
   * service.
   * </pre>
   */
  public static final class WorkerServiceFutureStub extends io.grpc.stub.AbstractFutureStub<WorkerServiceFutureStub> {
    private WorkerServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected WorkerServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new WorkerServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetWorkerInfo returns the worker's current info. Ends with UNAVAILABLE and RetryInfo until the
     * model is loaded, and with UNAVAILABLE and the reason WORKER_DRAINING when it shuts down.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.GetWorkerInfoResponse> getWorkerInfo(
        io.millstream.v1.GetWorkerInfoRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetWorkerInfoMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_GET_WORKER_INFO = 0;
  private static final int METHODID_WATCH_WORKER_INFO = 1;
  private static final int METHODID_WATCH_LOAD = 2;
  private static final int METHODID_WATCH_KV_EVENTS = 3;
  private static final int METHODID_WATCH_LOAD_PROGRESS = 4;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final WorkerServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(WorkerServiceImplBase serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_GET_WORKER_INFO:
          serviceImpl.getWorkerInfo((io.millstream.v1.GetWorkerInfoRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.GetWorkerInfoResponse>) responseObserver);
          break;
        case METHODID_WATCH_WORKER_INFO:
          serviceImpl.watchWorkerInfo((io.millstream.v1.WatchWorkerInfoRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.WatchWorkerInfoResponse>) responseObserver);
          break;
        case METHODID_WATCH_LOAD:
          serviceImpl.watchLoad((io.millstream.v1.WatchLoadRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.WatchLoadResponse>) responseObserver);
          break;
        case METHODID_WATCH_KV_EVENTS:
          serviceImpl.watchKvEvents((io.millstream.v1.WatchKvEventsRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.WatchKvEventsResponse>) responseObserver);
          break;
        case METHODID_WATCH_LOAD_PROGRESS:
          serviceImpl.watchLoadProgress((io.millstream.v1.WatchLoadProgressRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.WatchLoadProgressResponse>) responseObserver);
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
        default:
          throw new AssertionError();
      }
    }
  }

  private static abstract class WorkerServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    WorkerServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.WorkerProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("WorkerService");
    }
  }

  private static final class WorkerServiceFileDescriptorSupplier
      extends WorkerServiceBaseDescriptorSupplier {
    WorkerServiceFileDescriptorSupplier() {}
  }

  private static final class WorkerServiceMethodDescriptorSupplier
      extends WorkerServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    WorkerServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (WorkerServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new WorkerServiceFileDescriptorSupplier())
              .addMethod(getGetWorkerInfoMethod())
              .addMethod(getWatchWorkerInfoMethod())
              .addMethod(getWatchLoadMethod())
              .addMethod(getWatchKvEventsMethod())
              .addMethod(getWatchLoadProgressMethod())
              .build();
        }
      }
    }
    return result;
  }
}
