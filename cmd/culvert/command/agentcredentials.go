package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/connect"
	"culvert.dev/internal/unixsocket"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// maxAgentSecret bounds a password and a token, in bytes. A head of 16 KiB has room for it.
const maxAgentSecret = 8 << 10

// agentCredentials are what an agent with auth is shown. A secret is never an argument.
type agentCredentials struct{ user, passwordFile, tokenFile string }

// agentCredentialFlags are the names of the flags that add makes.
var agentCredentialFlags = []string{"agent-user", "agent-password-file", "agent-token-file"}

func (c *agentCredentials) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.user, "agent-user", "", "`USER` to show to an agent that has auth")
	f.StringVar(&c.passwordFile, "agent-password-file", "", "`FILE` with the password of that user, read for each connection")
	f.StringVar(&c.tokenFile, "agent-token-file", "", "`FILE` with a bearer token to show to an agent that has auth, read for each connection")
	_ = cmd.MarkFlagFilename("agent-password-file")
	_ = cmd.MarkFlagFilename("agent-token-file")
	_ = cmd.RegisterFlagCompletionFunc("agent-user", cobra.NoFileCompletions)
}

func (c *agentCredentials) none() bool { return *c == agentCredentials{} }

// check finds mistakes in the flags, and a secret that cannot be read. The agent is at address.
func (c *agentCredentials) check(address string) error {
	switch {
	case c.none():
		return nil
	case (c.user == "") != (c.passwordFile == ""):
		return usageError("give both, or none", "--agent-user and --agent-password-file go together")
	case c.user != "" && c.tokenFile != "":
		return usageError("keep one of them", "--agent-token-file does not go with --agent-user")
	case strings.ContainsFunc(c.user, func(r rune) bool { return r == ':' || r < ' ' || r == 0x7f }):
		return usageError("leave the password to --agent-password-file", "--agent-user has a colon, which ends the name of a user, or a control character")
	case !onThisHost(address):
		return usageError("ask an agent at a port of loopback, or at unix:PATH", "--agent %q: credentials are not sent to another host without TLS", address)
	}
	_, err := c.read()
	return usageOrNil(err)
}

// onThisHost reports whether an address, HOST:PORT or unix:PATH, is that of this host alone.
func onThisHost(address string) bool {
	_, socket := unixsocket.Path(address)
	return socket || registry.OnLoopback(address)
}

// read returns the credentials as fields of a request. Its errors have nothing of what was read.
func (c *agentCredentials) read() (connect.Fields, error) {
	flag, path := "--agent-token-file", c.tokenFile
	if c.user != "" {
		flag, path = "--agent-password-file", c.passwordFile
	}
	if path == "" {
		return nil, nil
	}
	secret, err := readSecret(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	value := connect.BearerCredentials(secret)
	if c.user != "" {
		value = connect.BasicCredentials(c.user, secret)
	}
	return connect.Fields{{Name: "Proxy-Authorization", Value: value}}, nil
}

// readSecret returns the only line of the file at path.
func readSecret(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	line, err := io.ReadAll(io.LimitReader(f, maxAgentSecret+3))
	if err != nil {
		return "", err
	}
	line = bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
	switch {
	case len(line) == 0:
		return "", errors.New("the file is empty")
	case len(line) > maxAgentSecret:
		return "", fmt.Errorf("the file has more than %d bytes", maxAgentSecret)
	case bytes.ContainsFunc(line, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "", errors.New("the file has more than one line, or a control character")
	}
	return string(line), nil
}

// use has d show the credentials, and returns what says in an error of d's one connection
// what to do about it.
func (c *agentCredentials) use(d *connect.Dialer) (explain func(error) error) {
	asked := false
	d.Header = func(context.Context, string) (connect.Fields, error) { return c.read() }
	d.Answer = func(status int, fields connect.Fields) error {
		_, challenges := fields.Get("Proxy-Authenticate")
		asked = status == http.StatusProxyAuthRequired && challenges > 0
		return nil
	}
	return func(err error) error {
		refused, ok := errors.AsType[*tunnel.Error](err)
		if !ok || !asked {
			return err
		}
		what := "the agent asks for credentials, add --agent-user and --agent-password-file, or --agent-token-file"
		switch {
		case c.user != "":
			what = "the agent does not accept the credentials, check --agent-user and what --agent-password-file has"
		case c.tokenFile != "":
			what = "the agent does not accept the token, check what --agent-token-file has"
		}
		said := *refused
		said.Err = fmt.Errorf("%s: %w", what, err)
		return &said
	}
}
