package main

import (
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// codeName is the canonical name, DEADLINE_EXCEEDED; grpc-go's own is DeadlineExceeded. A context's
// own error becomes the code it stands for.
func codeName(err error) string {
	return code.Code(status.Convert(err).Code()).String()
}

// printError decodes the details that the server put into grpc-status-details-bin; status.Details does
// the decoding. A failure of gRPC itself, such as a lost connection, has none.
func printError(call string, err error) {
	found := status.Convert(err)
	e := event{
		"event": "error", "call": call, "code": codeName(err), "message": found.Message(),
		"reason": "", "domain": "", "retryable": false, "retry_delay_s": nil,
	}
	violations := []event{}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			e["reason"], e["domain"] = detail.GetReason(), detail.GetDomain()
			e["retryable"] = detail.GetMetadata()["retryable"] == "true"
		case *errdetails.BadRequest:
			for _, v := range detail.GetFieldViolations() {
				violations = append(violations, event{
					"field": v.GetField(), "description": v.GetDescription(),
				})
			}
		case *errdetails.RetryInfo:
			e["retry_delay_s"] = detail.GetRetryDelay().AsDuration().Seconds()
		}
	}
	e["violations"] = violations
	print(e)
}
