package io.millstream.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * AdminService lets operators inspect one running process and change its log levels. It is served on
 * the admin address only, with grpc.channelz.v1.Channelz, never on the public address. It is about
 * one process: call each replica separately; a restart resets what was set.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class AdminServiceGrpc {

  private AdminServiceGrpc() {}

  public static final String SERVICE_NAME = "millstream.v1.AdminService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.GetServerStatusRequest,
      io.millstream.v1.GetServerStatusResponse> getGetServerStatusMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetServerStatus",
      requestType = io.millstream.v1.GetServerStatusRequest.class,
      responseType = io.millstream.v1.GetServerStatusResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.GetServerStatusRequest,
      io.millstream.v1.GetServerStatusResponse> getGetServerStatusMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.GetServerStatusRequest, io.millstream.v1.GetServerStatusResponse> getGetServerStatusMethod;
    if ((getGetServerStatusMethod = AdminServiceGrpc.getGetServerStatusMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getGetServerStatusMethod = AdminServiceGrpc.getGetServerStatusMethod) == null) {
          AdminServiceGrpc.getGetServerStatusMethod = getGetServerStatusMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.GetServerStatusRequest, io.millstream.v1.GetServerStatusResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetServerStatus"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GetServerStatusRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.GetServerStatusResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("GetServerStatus"))
              .build();
        }
      }
    }
    return getGetServerStatusMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.millstream.v1.SetLogLevelRequest,
      io.millstream.v1.SetLogLevelResponse> getSetLogLevelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "SetLogLevel",
      requestType = io.millstream.v1.SetLogLevelRequest.class,
      responseType = io.millstream.v1.SetLogLevelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.millstream.v1.SetLogLevelRequest,
      io.millstream.v1.SetLogLevelResponse> getSetLogLevelMethod() {
    io.grpc.MethodDescriptor<io.millstream.v1.SetLogLevelRequest, io.millstream.v1.SetLogLevelResponse> getSetLogLevelMethod;
    if ((getSetLogLevelMethod = AdminServiceGrpc.getSetLogLevelMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getSetLogLevelMethod = AdminServiceGrpc.getSetLogLevelMethod) == null) {
          AdminServiceGrpc.getSetLogLevelMethod = getSetLogLevelMethod =
              io.grpc.MethodDescriptor.<io.millstream.v1.SetLogLevelRequest, io.millstream.v1.SetLogLevelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "SetLogLevel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.SetLogLevelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.millstream.v1.SetLogLevelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("SetLogLevel"))
              .build();
        }
      }
    }
    return getSetLogLevelMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static AdminServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceStub>() {
        @java.lang.Override
        public AdminServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceStub(channel, callOptions);
        }
      };
    return AdminServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static AdminServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceBlockingStub>() {
        @java.lang.Override
        public AdminServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceBlockingStub(channel, callOptions);
        }
      };
    return AdminServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static AdminServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceFutureStub>() {
        @java.lang.Override
        public AdminServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceFutureStub(channel, callOptions);
        }
      };
    return AdminServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * AdminService lets operators inspect one running process and change its log levels. It is served on
   * the admin address only, with grpc.channelz.v1.Channelz, never on the public address. It is about
   * one process: call each replica separately; a restart resets what was set.
   * </pre>
   */
  public static abstract class AdminServiceImplBase implements io.grpc.BindableService {

    /**
     * <pre>
     * GetServerStatus returns the process's identity, settings, health and open work.
     * </pre>
     */
    public void getServerStatus(io.millstream.v1.GetServerStatusRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.GetServerStatusResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetServerStatusMethod(), responseObserver);
    }

    /**
     * <pre>
     * SetLogLevel sets the level of one logger of this process; child processes, such as an engine's,
     * keep theirs. Ends with INVALID_ARGUMENT if the level is not set or unknown, if the process has no
     * such logger, or for INHERIT on the root logger.
     * </pre>
     */
    public void setLogLevel(io.millstream.v1.SetLogLevelRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.SetLogLevelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getSetLogLevelMethod(), responseObserver);
    }

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
          .addMethod(
            getGetServerStatusMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.GetServerStatusRequest,
                io.millstream.v1.GetServerStatusResponse>(
                  this, METHODID_GET_SERVER_STATUS)))
          .addMethod(
            getSetLogLevelMethod(),
            io.grpc.stub.ServerCalls.asyncUnaryCall(
              new MethodHandlers<
                io.millstream.v1.SetLogLevelRequest,
                io.millstream.v1.SetLogLevelResponse>(
                  this, METHODID_SET_LOG_LEVEL)))
          .build();
    }
  }

  /**
   * <pre>
   * AdminService lets operators inspect one running process and change its log levels. It is served on
   * the admin address only, with grpc.channelz.v1.Channelz, never on the public address. It is about
   * one process: call each replica separately; a restart resets what was set.
   * </pre>
   */
  public static final class AdminServiceStub extends io.grpc.stub.AbstractAsyncStub<AdminServiceStub> {
    private AdminServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetServerStatus returns the process's identity, settings, health and open work.
     * </pre>
     */
    public void getServerStatus(io.millstream.v1.GetServerStatusRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.GetServerStatusResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetServerStatusMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * SetLogLevel sets the level of one logger of this process; child processes, such as an engine's,
     * keep theirs. Ends with INVALID_ARGUMENT if the level is not set or unknown, if the process has no
     * such logger, or for INHERIT on the root logger.
     * </pre>
     */
    public void setLogLevel(io.millstream.v1.SetLogLevelRequest request,
        io.grpc.stub.StreamObserver<io.millstream.v1.SetLogLevelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getSetLogLevelMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * <pre>
   * AdminService lets operators inspect one running process and change its log levels. It is served on
   * the admin address only, with grpc.channelz.v1.Channelz, never on the public address. It is about
   * one process: call each replica separately; a restart resets what was set.
   * </pre>
   */
  public static final class AdminServiceBlockingStub extends io.grpc.stub.AbstractBlockingStub<AdminServiceBlockingStub> {
    private AdminServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetServerStatus returns the process's identity, settings, health and open work.
     * </pre>
     */
    public io.millstream.v1.GetServerStatusResponse getServerStatus(io.millstream.v1.GetServerStatusRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetServerStatusMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * SetLogLevel sets the level of one logger of this process; child processes, such as an engine's,
     * keep theirs. Ends with INVALID_ARGUMENT if the level is not set or unknown, if the process has no
     * such logger, or for INHERIT on the root logger.
     * </pre>
     */
    public io.millstream.v1.SetLogLevelResponse setLogLevel(io.millstream.v1.SetLogLevelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getSetLogLevelMethod(), getCallOptions(), request);
    }
  }

  /**
   * <pre>
   * AdminService lets operators inspect one running process and change its log levels. It is served on
   * the admin address only, with grpc.channelz.v1.Channelz, never on the public address. It is about
   * one process: call each replica separately; a restart resets what was set.
   * </pre>
   */
  public static final class AdminServiceFutureStub extends io.grpc.stub.AbstractFutureStub<AdminServiceFutureStub> {
    private AdminServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * GetServerStatus returns the process's identity, settings, health and open work.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.GetServerStatusResponse> getServerStatus(
        io.millstream.v1.GetServerStatusRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetServerStatusMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * SetLogLevel sets the level of one logger of this process; child processes, such as an engine's,
     * keep theirs. Ends with INVALID_ARGUMENT if the level is not set or unknown, if the process has no
     * such logger, or for INHERIT on the root logger.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.millstream.v1.SetLogLevelResponse> setLogLevel(
        io.millstream.v1.SetLogLevelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getSetLogLevelMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_GET_SERVER_STATUS = 0;
  private static final int METHODID_SET_LOG_LEVEL = 1;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final AdminServiceImplBase serviceImpl;
    private final int methodId;

    MethodHandlers(AdminServiceImplBase serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_GET_SERVER_STATUS:
          serviceImpl.getServerStatus((io.millstream.v1.GetServerStatusRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.GetServerStatusResponse>) responseObserver);
          break;
        case METHODID_SET_LOG_LEVEL:
          serviceImpl.setLogLevel((io.millstream.v1.SetLogLevelRequest) request,
              (io.grpc.stub.StreamObserver<io.millstream.v1.SetLogLevelResponse>) responseObserver);
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

  private static abstract class AdminServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    AdminServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.millstream.v1.AdminProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("AdminService");
    }
  }

  private static final class AdminServiceFileDescriptorSupplier
      extends AdminServiceBaseDescriptorSupplier {
    AdminServiceFileDescriptorSupplier() {}
  }

  private static final class AdminServiceMethodDescriptorSupplier
      extends AdminServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final String methodName;

    AdminServiceMethodDescriptorSupplier(String methodName) {
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
      synchronized (AdminServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new AdminServiceFileDescriptorSupplier())
              .addMethod(getGetServerStatusMethod())
              .addMethod(getSetLogLevelMethod())
              .build();
        }
      }
    }
    return result;
  }
}
