// A client of Millstream in C++; tests/support/clients/client_examples.py says what it does.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "millstream/v1/processor.grpc.pb.h"

namespace ms = millstream::v1;
using google::protobuf::ListValue;
using google::protobuf::Struct;
using google::protobuf::Value;

namespace {

std::string Setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void Print(const std::string& event, Struct fields) {
  (*fields.mutable_fields())["event"].set_string_value(event);
  std::string line;
  (void)google::protobuf::util::MessageToJsonString(fields, &line);
  std::cout << line << std::endl;
}

class Fields {
 public:
  Fields& Text(const std::string& name, const std::string& value) {
    At(name).set_string_value(value);
    return *this;
  }
  Fields& Number(const std::string& name, double value) {
    At(name).set_number_value(value);
    return *this;
  }
  Value& At(const std::string& name) { return (*fields_.mutable_fields())[name]; }
  operator Struct() const { return fields_; }

 private:
  Struct fields_;
};

// grpc::StatusCode has no names of its own.
std::string NameOf(grpc::StatusCode code) {
  static const std::map<grpc::StatusCode, std::string> names = {
      {grpc::OK, "OK"},
      {grpc::INVALID_ARGUMENT, "INVALID_ARGUMENT"},
      {grpc::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
      {grpc::RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"},
      {grpc::UNAVAILABLE, "UNAVAILABLE"},
      {grpc::UNAUTHENTICATED, "UNAUTHENTICATED"}};
  const auto found = names.find(code);
  return found == names.end() ? std::to_string(code) : found->second;
}

// A context is for one call.
std::unique_ptr<grpc::ClientContext> Context(double seconds, bool with_key = true) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::milliseconds(static_cast<int>(seconds * 1000)));
  if (with_key) {
    context->AddMetadata("authorization", "Bearer " + Setting("MILLSTREAM_API_KEY"));
    context->AddMetadata("traceparent", Setting("TRACEPARENT"));
  }
  return context;
}

std::shared_ptr<grpc::Channel> Connect() {
  std::ifstream file(Setting("MILLSTREAM_SERVICE_CONFIG"));
  std::stringstream config;
  config << file.rdbuf();
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(config.str());
  // `ipv4:` takes a list; a DNS name is `dns:///name:50051`. With TLS: grpc::SslCredentials({}).
  return grpc::CreateCustomChannel("ipv4:" + Setting("MILLSTREAM_ADDRESSES"),
                                   grpc::InsecureChannelCredentials(), arguments);
}

void AskForHealth(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service("millstream.v1.ProcessorService");
  grpc::health::v1::HealthCheckResponse response;
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  if (!stub->Check(Context(10).get(), request, &response).ok()) std::exit(1);
  Print("health", Fields().Text("status", grpc::health::v1::HealthCheckResponse::ServingStatus_Name(
                                              response.status())));
}

void SetTokens(ms::GenerationOptions* options, int count) {
  options->mutable_sampling()->set_max_new_tokens(count);
  options->mutable_sampling()->set_ignore_eos(true);
}

// Two turns on one stream; the first is cancelled after its third message.
void Chat(ms::ProcessorService::Stub& processor) {
  const auto context = Context(30);
  const auto stream = processor.Chat(context.get());
  ms::ChatRequest start;
  start.mutable_start()->set_model(Setting("MILLSTREAM_MODEL"));
  ms::ChatMessage* message = start.mutable_start()->add_messages();
  message->set_role(ms::CHAT_ROLE_USER);
  message->add_content()->set_text("Hello");
  SetTokens(start.mutable_start()->mutable_options(), 400);
  stream->Write(start);
  int deltas = 0;
  ms::ChatResponse response;
  while (stream->Read(&response)) {
    for (const ms::ChoiceDelta& choice : response.choices()) {
      if (!choice.text().empty()) {
        Print("delta", Fields().Number("turn", response.turn()).Text("text", choice.text()));
        if (++deltas == 3) {
          ms::ChatRequest cancel;
          cancel.mutable_cancel()->set_turn(response.turn());
          stream->Write(cancel);
        }
      }
      if (choice.finish_reason() != ms::FINISH_REASON_UNSPECIFIED) {
        Print("finished",
              Fields()
                  .Number("turn", response.turn())
                  .Text("finish_reason", ms::FinishReason_Name(choice.finish_reason()))
                  .Number("completion_tokens", response.finished().usage().completion_tokens()));
      }
    }
    if (!response.has_finished()) continue;
    if (response.turn() == 1) {
      ms::ChatRequest next;
      next.mutable_user_turn()->add_content()->set_text("Go on");
      SetTokens(next.mutable_user_turn()->mutable_options(), 5);
      stream->Write(next);
    } else {
      stream->WritesDone();
    }
  }
  // Read returns false at the end and on a failure alike: Finish says which.
  const grpc::Status status = stream->Finish();
  Print("ended", Fields().Text("call", "chat").Text("code", NameOf(status.error_code())));
}

ms::CompleteRequest Prompt(int tokens) {
  ms::CompleteRequest request;
  request.set_model(Setting("MILLSTREAM_MODEL"));
  request.set_text("Hello");
  SetTokens(request.mutable_options(), tokens);
  return request;
}

grpc::Status Complete(ms::ProcessorService::Stub& processor, const ms::CompleteRequest& request,
                      const std::unique_ptr<grpc::ClientContext>& context = Context(10)) {
  const auto stream = processor.Complete(context.get(), request);
  ms::CompleteResponse response;
  while (stream->Read(&response)) {
  }
  return stream->Finish();
}

// The trailer grpc-status-details-bin is Status::error_details(), a serialized google.rpc.Status.
void Explain(const std::string& call, const grpc::Status& status) {
  Fields fields;
  fields.Text("call", call).Text("code", NameOf(status.error_code()));
  fields.Text("message", status.error_message());
  fields.At("retry_delay_s").set_null_value({});
  ListValue* violations = fields.At("violations").mutable_list_value();
  google::rpc::Status rich;
  rich.ParseFromString(status.error_details());
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest invalid;
  google::rpc::RetryInfo retry;
  for (const google::protobuf::Any& detail : rich.details()) {
    if (detail.UnpackTo(&info)) {
      fields.Text("reason", info.reason()).Text("domain", info.domain());
      fields.At("retryable").set_bool_value(info.metadata().at("retryable") == "true");
    } else if (detail.UnpackTo(&invalid)) {
      for (const auto& violation : invalid.field_violations()) {
        *violations->add_values()->mutable_struct_value() =
            Fields().Text("field", violation.field()).Text("description", violation.description());
      }
    } else if (detail.UnpackTo(&retry)) {
      const google::protobuf::Duration& delay = retry.retry_delay();
      fields.Number("retry_delay_s", static_cast<double>(delay.seconds()) + delay.nanos() / 1e9);
    }
  }
  Print("error", fields);
}

}  // namespace

int main() {
  const std::shared_ptr<grpc::Channel> channel = Connect();
  const auto processor = ms::ProcessorService::NewStub(channel);
  AskForHealth(channel);
  Chat(*processor);
  const grpc::Status late = Complete(*processor, Prompt(400), Context(0.5));
  Print("ended", Fields().Text("call", "deadline").Text("code", NameOf(late.error_code())));
  ms::CompleteRequest invalid = Prompt(1);
  invalid.mutable_options()->mutable_sampling()->set_top_p(2);
  Explain("invalid", Complete(*processor, invalid));
  ms::CompleteRequest overloaded = Prompt(1);
  overloaded.set_model(Setting("MILLSTREAM_FULL_MODEL"));
  Explain("overloaded", Complete(*processor, overloaded));
  Explain("no_key", Complete(*processor, Prompt(1), Context(10, false)));
  int calls = 0;
  const int wanted = std::stoi(Setting("MILLSTREAM_CALLS"));
  while (calls < wanted && Complete(*processor, Prompt(1)).ok()) ++calls;
  Print("balanced", Fields().Number("calls", calls));
}
