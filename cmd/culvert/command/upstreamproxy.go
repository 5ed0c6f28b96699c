package command

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/dns"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// upstreamProxy is the proxy through which c has gateways dialed; nil for none.
func upstreamProxy(c *file.Config) *upstream.Proxy {
	p := c.UpstreamProxy
	if p == nil {
		return nil
	}
	return &upstream.Proxy{URL: p.URL, Roots: p.Roots, User: p.User, PasswordFile: p.PasswordFile, PasswordCommand: p.PasswordCommand}
}

// proxyFlags are the flags of an upstream proxy for a command that has no configuration. The
// password is never an argument.
type proxyFlags struct{ url, user, passwordFile string }

func (p *proxyFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&p.url, "upstream-proxy", "", "of a device: `URL` of the HTTP proxy through which the gateway is reached")
	f.StringVar(&p.user, "upstream-proxy-user", "", "of a device: `USER` of that proxy")
	f.StringVar(&p.passwordFile, "upstream-proxy-password-file", "", "of a device: `FILE` with the password of that user")
	_ = cmd.MarkFlagFilename("upstream-proxy-password-file")
	for _, name := range []string{"upstream-proxy", "upstream-proxy-user"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
}

// dialer returns what dials a gateway: through the proxy, if there is one. The caller calls done
// when it dials no more.
func (p *proxyFlags) dialer() (d tunnel.Dialer, done func(), err error) {
	switch {
	case p.url == "" && p.user+p.passwordFile != "":
		return nil, nil, usageError("add --upstream-proxy URL", "--upstream-proxy-user and --upstream-proxy-password-file are for an upstream proxy")
	case (p.user == "") != (p.passwordFile == ""):
		return nil, nil, usageError("give both, or none", "--upstream-proxy-user and --upstream-proxy-password-file go together")
	case p.url == "":
		return new(net.Dialer), func() {}, nil
	}
	t := &upstream.Transports{Direct: &tunnel.NetDialer{Guard: &tunnel.Guard{}}, Lookup: new(dns.Resolver).Lookup, ReadFile: os.ReadFile}
	if err := t.UseProxy(&upstream.Proxy{URL: p.url, User: p.user, PasswordFile: p.passwordFile}); err != nil {
		return nil, nil, usageError("", "--upstream-proxy: %w", err)
	}
	return t.FirstHop(), t.Close, nil
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
