package main

import (
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/status"

	"github.com/millstream/millstream/generated/go/failure"
)

// codeName is the canonical name, DEADLINE_EXCEEDED; grpc-go's own is DeadlineExceeded. A context's
// own error becomes the code it stands for.
func codeName(err error) string {
	return code.Code(status.Convert(err).Code()).String()
}

// printError prints the details that the server put into grpc-status-details-bin.
func printError(call string, err error) {
	f := failure.Of(err)
	if f == nil { // a failure of gRPC itself, such as a lost connection
		f = &failure.Failure{Message: status.Convert(err).Message()}
	}
	violations := []event{}
	for _, v := range f.Violations {
		violations = append(violations, event{"field": v.Field, "description": v.Description})
	}
	var delay any
	if f.RetryDelay > 0 {
		delay = f.RetryDelay.Seconds()
	}
	print(event{
		"event": "error", "call": call, "code": codeName(err), "message": f.Message,
		"reason": f.Reason, "domain": f.Domain, "retryable": f.Retryable,
		"violations": violations, "retry_delay_s": delay,
	})
}
