package command

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry/file"
)

// upstreamProxy is the proxy through which c has gateways dialed; nil for none.
func upstreamProxy(c *file.Config) *upstream.Proxy {
	p := c.UpstreamProxy
	if p == nil {
		return nil
	}
	return &upstream.Proxy{URL: p.URL, Roots: p.Roots, User: p.User, PasswordFile: p.PasswordFile, PasswordCommand: p.PasswordCommand}
}

// runCommand returns what the command argv writes to its standard output, of at most limit
// bytes. The error has nothing of it, nor of what the command writes elsewhere, as both may
// be a secret.
func runCommand(ctx context.Context, argv []string, limit int) ([]byte, error) {
	out := &limitedBuffer{limit: limit}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout = out
	cmd.WaitDelay = time.Second // for a child of it that keeps the pipe
	err := cmd.Run()
	switch ended := (*exec.ExitError)(nil); {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("command %q did not end in time", argv[0])
	case out.full:
		return nil, fmt.Errorf("command %q writes more than %d bytes", argv[0], limit)
	case errors.As(err, &ended):
		return nil, fmt.Errorf("command %q failed (%s): run it in a terminal to see why", argv[0], ended.ProcessState)
	case err != nil:
		return nil, fmt.Errorf("command %q: %w", argv[0], err)
	}
	return out.content, nil
}

// A limitedBuffer fails a write over its limit.
type limitedBuffer struct {
	content []byte
	limit   int
	full    bool
}

// Write implements io.Writer.
func (b *limitedBuffer) Write(p []byte) (int, error) {
	if len(b.content)+len(p) > b.limit {
		b.full = true
		return 0, errors.New("too much")
	}
	b.content = append(b.content, p...)
	return len(p), nil
}
