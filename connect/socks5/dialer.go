package socks5

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"culvert.dev/tunnel"
)

// defaultTimeout is the Wait of a Dialer where that is 0.
const defaultTimeout = 15 * time.Second

// A Dialer reaches its destinations through a SOCKS5 proxy. It is a
// tunnel.Dialer, so one can be the way to another. It is safe for concurrent
// use and keeps no connections.
//
// Names are always the proxy's to resolve: what is dialed as a name is sent as
// one.
type Dialer struct {
	// Proxy is the address of the proxy, "host:port".
	Proxy string

	// Dialer is the way to the proxy; nil means a net.Dialer.
	Dialer tunnel.Dialer

	// User and Password are offered to the proxy, at most 255 bytes each. An
	// empty User offers none. They cross the way to the proxy in clear.
	User, Password string

	// Wait limits the time from the connection to the last byte of the proxy's
	// answer; the proxy dials within it. 0 means 15 s.
	Wait time.Duration
}

var _ tunnel.Dialer = (*Dialer)(nil)

// DialContext asks the proxy for addr, "host:port", "1.2.3.4:port" or
// "[2001:db8::1]:port"; network is "tcp". The ctx covers the dial and nothing after.
// It is the only limit on reaching the proxy where Dialer has none of its own.
//
// The net.Conn is the very connection that leads to the proxy, and belongs to
// the caller.
//
// A refusal is a *tunnel.Error whose Reason is the one the proxy's reply comes
// nearest to.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if network != "tcp" {
		return nil, net.UnknownNetworkError(network)
	}
	to, err := parseAddr(addr)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.BadRequest, "socks5: destination %q: %w", tunnel.Clip(addr), err)
	}
	if len(d.User) > 255 || len(d.Password) > 255 {
		return nil, fmt.Errorf("socks5: the user name has %d bytes and the password %d, limit 255", len(d.User), len(d.Password))
	}
	if d.User != "" && d.Password == "" {
		return nil, errors.New("socks5: a user name without a password")
	}
	dialer := d.Dialer
	if dialer == nil {
		dialer = new(net.Dialer)
	}
	conn, err := dialer.DialContext(ctx, "tcp", d.Proxy)
	if err != nil {
		return nil, d.failed(ctx, "cannot be reached", err)
	}

	// A close ends any wait on conn. A deadline could be overwritten by that of open.
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close()
		close(closed)
	})
	err = d.open(ctx, conn, to, addr)
	if !stop() {
		<-closed
		err = d.failed(ctx, "was given up", ctx.Err())
	}
	if err == nil {
		if err = conn.SetDeadline(time.Time{}); err != nil {
			err = d.failed(ctx, "is gone", err)
		}
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// parseAddr reads an address as Go writes it.
func parseAddr(addr string) (to destination, err error) {
	host, digits, err := net.SplitHostPort(addr)
	if err != nil {
		return to, errors.New("want host:port")
	}
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 {
		return to, errors.New("the port is not a number from 1 to 65535")
	}
	to.port = uint16(port)
	to.name, to.addr, err = parseHost(host)
	return to, err
}

// open sends the request on conn and reads the answer. It reads no byte behind that.
func (d *Dialer) open(ctx context.Context, conn net.Conn, to destination, addr string) error {
	wait := d.Wait
	if wait <= 0 {
		wait = defaultTimeout
	}
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return d.failed(ctx, "is gone", err)
	}
	greeting := []byte{version5, 1, methodNone}
	if d.User != "" {
		greeting = []byte{version5, 2, methodNone, methodPassword}
	}
	var in [5 + 255 + 2]byte
	got, err := ask(conn, greeting, in[:2])
	switch {
	case err != nil:
		return d.failed(ctx, "gave no answer", err)
	case got[0] != version5:
		return d.failed(ctx, "gave no answer that can be read", fmt.Errorf("it begins with %#02x, want %#02x", got[0], version5))
	case got[1] == methodPassword && d.User != "":
		if err := d.authenticate(ctx, conn); err != nil {
			return err
		}
	case got[1] == methodRefused:
		return tunnel.HopRefusedf(tunnel.NoAuth, "socks5: proxy %q takes none of the methods [% x]", d.Proxy, greeting[2:])
	case got[1] != methodNone:
		return d.failed(ctx, "gave no answer that can be read", fmt.Errorf("it chose method %#02x, which was not offered", got[1]))
	}

	if err := tunnel.HandshakeDone(ctx); err != nil {
		return d.failed(ctx, "is not asked", err)
	}
	// With the first five bytes the length of the answer is known.
	if got, err = ask(conn, appendRequest(nil, to), in[:5]); err != nil {
		return d.failed(ctx, "gave no answer", err)
	}
	rest := 0
	switch {
	case got[0] != version5:
		return d.failed(ctx, "gave no answer that can be read", fmt.Errorf("it begins with %#02x, want %#02x", got[0], version5))
	case got[1] != byte(Succeeded):
		// The rest of the answer is of no use, and need not come.
		r := Reply(got[1])
		why, ok := reasons[r]
		if !ok {
			why = tunnel.DialFailed
		}
		return tunnel.HopRefusedf(why, "socks5: proxy %q refused %q: %s (%#02x)", d.Proxy, addr, r, got[1])
	case got[3] == typeIPv4:
		rest = 4 + 2 - 1
	case got[3] == typeIPv6:
		rest = 16 + 2 - 1
	case got[3] == typeName:
		rest = int(got[4]) + 2
	default:
		return d.failed(ctx, "gave no answer that can be read", fmt.Errorf("address type %#02x", got[3]))
	}
	if _, err := io.ReadFull(conn, in[:rest]); err != nil {
		return d.failed(ctx, "gave half an answer", err)
	}
	return nil
}

// authenticate sends the user name and the password, RFC 1929.
func (d *Dialer) authenticate(ctx context.Context, conn net.Conn) error {
	b := append([]byte{versionAuth, byte(len(d.User))}, d.User...)
	b = append(append(b, byte(len(d.Password))), d.Password...)
	var in [2]byte
	got, err := ask(conn, b, in[:])
	switch {
	case err != nil:
		return d.failed(ctx, "gave no answer to the password", err)
	case got[1] != 0: // some write 5 for the version, so it is not looked at
		return tunnel.HopRefusedf(tunnel.NoAuth, "socks5: proxy %q does not accept the user name and the password", d.Proxy)
	}
	return nil
}

// ask sends out and fills in.
func ask(conn net.Conn, out, in []byte) ([]byte, error) {
	if _, err := conn.Write(out); err != nil {
		return nil, err
	}
	if n, err := io.ReadFull(conn, in); err != nil {
		return nil, fmt.Errorf("after %d bytes of %d: %w", n, len(in), err)
	}
	return in, nil
}

// failed returns the error for a proxy that cannot be used.
func (d *Dialer) failed(ctx context.Context, what string, err error) error {
	var ne net.Error
	reason := tunnel.DialFailed
	switch {
	case ctx.Err() != nil:
		// The caller has given up: the error is that of its context.
		return fmt.Errorf("socks5: proxy %q %s: %w", d.Proxy, what, ctx.Err())
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &ne) && ne.Timeout():
		reason = tunnel.DialTimeout
	default:
		switch why := tunnel.ReasonOf(err); why {
		case tunnel.Prohibited, tunnel.Loop, tunnel.Overload: // of the way to the proxy
			reason = why
		}
	}
	return tunnel.Refusef(reason, "socks5: proxy %q %s: %w", d.Proxy, what, err)
}
