//go:build !linux

package isolate

import (
	"context"
	"errors"
	"os/exec"
)

var errElsewhere = errors.New("namespaces need Linux")

// Start fails.
func Start(*exec.Cmd) (*Sockets, error) { return nil, &Unavailable{errElsewhere} }

// Enter fails.
func Enter(context.Context, []string) (int, error) { return NotSetUp, errElsewhere }
