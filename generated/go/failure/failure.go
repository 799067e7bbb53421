// Package failure decodes why a call to Millstream failed.
package failure

import (
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Violation is an invalid field of a request.
type Violation struct {
	Field       string // path from the request's root: options.sampling.top_p
	Description string // what is wrong with it, and what is allowed
}

// Failure is why an RPC failed, in full: what the trailer grpc-status-details-bin carries.
type Failure struct {
	Code       codes.Code
	Message    string        // a sentence for the caller's developer
	Reason     string        // the stable cause: a name of ErrorReason, such as OVERLOADED
	Domain     string        // millstream.io, if a service of Millstream says it
	Retryable  bool          // whether the same request may succeed when it is sent again
	ErrorID    string        // finds the server's log line, when the code is INTERNAL
	Violations []Violation   // every invalid field that was found
	RetryDelay time.Duration // least time to wait before it is sent again; 0 if the server names none
}

// Of decodes the error that a call ended with, wrapped or not. It returns nil when the error carries no
// details, because the library made it (a lost connection, a deadline) or it isn't an RPC's.
func Of(err error) *Failure {
	// Not status.FromError: it unwraps errors since grpc-go 1.55 only.
	var found interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &found) || len(found.GRPCStatus().Details()) == 0 {
		return nil
	}
	s := found.GRPCStatus()
	f := &Failure{Code: s.Code(), Message: s.Message()}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			f.Reason, f.Domain = detail.GetReason(), detail.GetDomain()
			f.Retryable = detail.GetMetadata()["retryable"] == "true"
			f.ErrorID = detail.GetMetadata()["error_id"]
		case *errdetails.BadRequest:
			for _, v := range detail.GetFieldViolations() {
				f.Violations = append(f.Violations, Violation{v.GetField(), v.GetDescription()})
			}
		case *errdetails.RetryInfo:
			f.RetryDelay = detail.GetRetryDelay().AsDuration()
		}
	}
	return f
}
