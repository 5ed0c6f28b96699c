package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/admin"
	"culvert.dev/registry/file"
)

// adminOptions are the flags that say which running gateway is asked.
type adminOptions struct {
	addr   string
	config string
}

func (o *adminOptions) add(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(&o.addr, "admin", "", "`ADDR` of the gateway's admin port: HOST:PORT or unix:PATH")
	f.StringVar(&o.config, "config", "", "the gateway's configuration `FILE`, which has the address")
	_ = cmd.MarkPersistentFlagFilename("config", "yaml", "yml")
}

// client returns a client of the gateway that is meant.
func (o *adminOptions) client() (*adminClient, error) {
	addr := o.addr
	if addr == "" && o.config != "" {
		c, err := file.Load(o.config)
		if err != nil {
			return nil, usage(err)
		}
		if addr = c.Admin; addr == "" {
			return nil, usageError("add admin: 127.0.0.1:9090 or admin: unix:/run/culvert/admin.sock to it, and restart the gateway", "%s has no admin port", o.config)
		}
	}
	return askedGateway(addr)
}

// The admin address where no flag has one.
const (
	adminVariable = "CULVERT_ADMIN"
	adminDefault  = "unix:/run/culvert/admin.sock" // as the unit for systemd has it
)

// askedGateway returns a client of the gateway at addr or, without one, of that
// at $CULVERT_ADMIN or at the usual socket.
func askedGateway(addr string) (*adminClient, error) {
	if addr == "" {
		addr = os.Getenv(adminVariable)
	}
	if addr == "" {
		path, _ := admin.SocketPath(adminDefault)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, usageError(fmt.Sprintf("give --admin ADDR or --config FILE, or set $%s to what the gateway has as admin", adminVariable), "no gateway to ask is named, and there is no %s here", path)
		}
		addr = adminDefault
	}
	return newAdminClient(addr)
}

// An adminClient asks the admin port of a running gateway.
type adminClient struct {
	addr string
	host string // of its URLs
	http *http.Client
}

func newAdminClient(addr string) (*adminClient, error) {
	c := &adminClient{addr: addr, host: addr}
	// Without proxies: it is this host that is asked, or one named on purpose.
	t := &http.Transport{DisableKeepAlives: true}
	if path, ok := admin.SocketPath(addr); ok {
		if err := admin.CheckAddr(addr, true); err != nil {
			return nil, usageError("", "--admin: %w", err)
		}
		c.host = "localhost"
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	} else if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, usageError("write HOST:PORT or unix:PATH", "--admin %q: %w", addr, err)
	}
	c.http = &http.Client{Transport: t}
	return c, nil
}

// askTime is the limit for one question to a running gateway: the answer may be long.
const askTime = time.Minute

// ask asks for path, and decodes the answer into a value.
func (c *adminClient) ask(ctx context.Context, method, path string, q url.Values, into any) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	body, err := c.do(ctx, method, path, q)
	if err != nil {
		return err
	}
	defer body.Close()
	if err := json.NewDecoder(body).Decode(into); err != nil {
		return fmt.Errorf("the gateway's answer: %w", err)
	}
	return nil
}

// do asks for path. The answer is one of success, and its body the caller's to
// close.
func (c *adminClient) do(ctx context.Context, method, path string, q url.Values) (io.ReadCloser, error) {
	u := url.URL{Scheme: "http", Host: c.host, Path: path, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, usageError("write HOST:PORT or unix:PATH", "--admin %q: %w", c.addr, err)
	}
	return c.send(req)
}

// post has the gateway do what a form asks for, as do does.
func (c *adminClient) post(ctx context.Context, path string, form url.Values) (io.ReadCloser, error) {
	u := url.URL{Scheme: "http", Host: c.host, Path: path}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), strings.NewReader(form.Encode()))
	if err != nil {
		return nil, usageError("write HOST:PORT or unix:PATH", "--admin %q: %w", c.addr, err)
	}
	return c.send(req)
}

func (c *adminClient) send(req *http.Request) (io.ReadCloser, error) {
	method, path := req.Method, req.URL.Path
	resp, err := c.http.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // without the URL: nobody wrote that
		}
		if strings.Contains(err.Error(), "malformed HTTP response") { // an alert of TLS, for example
			return nil, c.noAdminPort("")
		}
		hint := "is it running with --admin " + c.addr + "?"
		if errors.Is(err, fs.ErrPermission) {
			hint = "only the user of the gateway may use the socket: run the command as that user"
		}
		return nil, &cliError{err: fmt.Errorf("ask the gateway: %w", err), hint: hint, code: exitFailed}
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	switch {
	case bytes.HasPrefix(answer, []byte("culvert: ")): // as listeners begin what they say
		return nil, c.noAdminPort("a listener of a gateway")
	case resp.StatusCode == http.StatusForbidden && method == http.MethodDelete:
		return nil, &cliError{
			err:  errors.New("the gateway does not close tunnels over TCP"),
			hint: "ask by a socket, with the gateway started with --admin unix:/run/culvert/admin.sock; or start it with --admin-control (adminControl: true in its file)",
			code: exitFailed,
		}
	case resp.StatusCode == http.StatusForbidden && method == http.MethodPost:
		return nil, &cliError{
			err:  errors.New("the gateway does not take this over TCP"),
			hint: "ask by a socket, with the gateway started with --admin unix:/run/culvert/admin.sock; or start it with --admin-control (adminControl: true in its file)",
			code: exitFailed,
		}
	case resp.StatusCode == http.StatusBadRequest && method == http.MethodPost:
		return nil, &cliError{err: errors.New(printable(strings.TrimSpace(string(answer)))), code: exitFailed}
	case resp.StatusCode == http.StatusNotFound, resp.StatusCode == http.StatusMethodNotAllowed:
		return nil, c.noAdminPort(fmt.Sprintf("it is the health port, an older culvert or another program: it has no %s %s", method, path))
	}
	return nil, fmt.Errorf("the gateway answered %s: %s", resp.Status, printable(strings.TrimSpace(string(answer))))
}

// noAdminPort says that what answers is something else.
func (c *adminClient) noAdminPort(is string) error {
	if is == "" {
		is = "it does not speak HTTP"
	} else {
		is = "it is " + is
	}
	return &cliError{
		err:  fmt.Errorf("%s is not the admin port: %s", c.addr, is),
		hint: "the admin port is set by \"admin:\" in the gateway's configuration or by its flag --admin",
		code: exitFailed,
	}
}
