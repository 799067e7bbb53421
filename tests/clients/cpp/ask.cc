// Asks one question and prints the answer as it comes: build/ask 127.0.0.1:50051 MODEL
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <iostream>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "millstream/v1/processor.grpc.pb.h"

namespace ms = millstream::v1;

int main(int, char** arguments) {
  // A server with TLS: grpc::SslCredentials({}).
  const auto channel = grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials());
  const auto processor = ms::ProcessorService::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  if (const char* key = std::getenv("MILLSTREAM_API_KEY")) {
    context.AddMetadata("authorization", std::string("Bearer ") + key);
  }

  ms::ChatRequest request;
  request.mutable_start()->set_model(arguments[2]);
  request.mutable_start()->mutable_options()->mutable_sampling()->set_max_new_tokens(5);
  ms::ChatMessage* message = request.mutable_start()->add_messages();
  message->set_role(ms::CHAT_ROLE_USER);
  message->add_content()->set_text("Hello");

  const auto stream = processor->Chat(&context);
  stream->Write(request);
  stream->WritesDone();  // one question only
  ms::ChatResponse response;
  while (stream->Read(&response)) {
    for (const ms::ChoiceDelta& choice : response.choices()) std::cout << choice.text() << std::flush;
    if (response.has_finished()) {
      std::cout << "\n" << response.finished().usage().completion_tokens() << " tokens" << std::endl;
    }
  }
  // Read returns false at the end and on a failure alike: Finish says which.
  const grpc::Status status = stream->Finish();
  if (status.ok()) return 0;
  google::rpc::Status rich;
  rich.ParseFromString(status.error_details());
  google::rpc::ErrorInfo info;
  for (const auto& detail : rich.details()) {
    if (detail.UnpackTo(&info)) std::cerr << info.reason() << ": ";
  }
  std::cerr << status.error_message() << std::endl;
  return 1;
}
