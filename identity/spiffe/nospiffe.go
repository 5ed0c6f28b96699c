//go:build nospiffe

package spiffe

import (
	"context"
	"errors"
	"log/slog"

	"culvert.dev/identity"
)

// Supported says whether this program has the Workload API.
const Supported = false

var errLeftOut = errors.New("this program was built without the SPIFFE Workload API (tag nospiffe)")

// A Source of a program without the Workload API does nothing.
type Source struct {
	Store  *identity.Store
	Socket string
	Log    *slog.Logger
}

// Configure does nothing.
func (s *Source) Configure(Config) {}

// Run is an error.
func (s *Source) Run(context.Context) error { return errLeftOut }

// Token is an error.
func (s *Source) Token(context.Context, string, ...string) (string, error) { return "", errLeftOut }

// Status says that there is nothing.
func (s *Source) Status() Status { return Status{Socket: s.Socket} }
