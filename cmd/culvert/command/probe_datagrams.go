package command

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"culvert.dev/connect/h3"
	"culvert.dev/sni"
)

// quic shakes hands with a service by QUIC, which a gateway passes on by the
// name in its hello.
func (p *prober) quic(ctx context.Context) error {
	cfg := p.tls.Clone()
	if len(cfg.NextProtos) == 0 {
		cfg.NextProtos = []string{"h3"} // QUIC has no handshake without
	}
	var conn *h3.RawQUIC
	start := time.Now()
	if err := p.step("udp + quic", func() (string, error) {
		var err error
		if conn, err = h3.DialRawQUIC(ctx, p.o.via, cfg); err != nil {
			return "", err
		}
		return "the handshake is complete", nil
	}); err != nil {
		p.refusedByQUIC(err)
		return err
	}
	defer conn.Close()
	state, wait := conn.State(), acceptance(start)
	return p.judge(&state, func() error { return conn.Accepted(wait) })
}

// refusedByQUIC notes a handshake that came to nothing.
func (p *prober) refusedByQUIC(err error) {
	r := &probeRefusal{Answer: err.Error()}
	var alert tls.AlertError
	switch {
	case errors.As(err, &alert):
		r.Reasons, r.Hint = reasonsOfAlert(sni.Alert(alert))
	case errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		r.Hint = "no answer: the path may block UDP, and a listener with \"refusal: close\" refuses like this"
	default:
		r.Hint = hintExplain
	}
	p.report.Refusal = r
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// again is when a datagram that was not answered is sent once more: it may have
// been lost.
const again = time.Second

// udp says something to a service at a port of UDP, and waits for what it says.
func (p *prober) udp(ctx context.Context) error {
	var conn net.Conn
	if err := p.step("udp", func() (string, error) {
		var err error
		if conn, err = new(net.Dialer).DialContext(ctx, "udp", p.o.via); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d bytes go to %s", len(p.send), conn.RemoteAddr()), nil
	}); err != nil {
		return err
	}
	defer conn.Close()
	err := p.step("service", func() (string, error) {
		said := make([]byte, 1<<16)
		for {
			if _, err := conn.Write(p.send); err != nil {
				return "", err
			}
			deadline := time.Now().Add(again)
			if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
				deadline = d
			}
			_ = conn.SetReadDeadline(deadline)
			n, err := conn.Read(said)
			switch {
			case err == nil:
				return fmt.Sprintf("it answers with %d bytes: %q", n, said[:min(n, 64)]), nil
			case !errors.Is(err, os.ErrDeadlineExceeded):
				return "", err
			case ctx.Err() != nil:
				return "", errors.New("no answer")
			}
		}
	})
	if err != nil {
		p.report.Refusal = &probeRefusal{
			Answer: err.Error(),
			Hint:   "a gateway does not answer clients that it refuses here, and a service may not answer a datagram that it cannot parse: \"culvert explain\" with --listener shows the gateway's decision",
		}
	}
	return err
}

// unescape reads what is to be sent: text, with the escapes of Go.
func unescape(s string) (b []byte, err error) {
	for s != "" {
		var r rune
		var wide bool
		if r, wide, s, err = strconv.UnquoteChar(s, 0); err != nil {
			return nil, err
		}
		if wide {
			b = utf8.AppendRune(b, r)
		} else {
			b = append(b, byte(r))
		}
	}
	return b, nil
}
