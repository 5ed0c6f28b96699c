package command

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"culvert.dev/connect"
	"culvert.dev/connect/connectudp"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
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
	err := p.step(serviceStep, func() (string, error) {
		answer := make([]byte, 1<<16)
		for {
			if _, err := conn.Write(p.send); err != nil {
				return "", err
			}
			deadline := time.Now().Add(again)
			if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
				deadline = d
			}
			_ = conn.SetReadDeadline(deadline)
			n, err := conn.Read(answer)
			switch {
			case err == nil:
				return describeAnswer(answer[:n]), nil
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

const serviceStep = "service"

// describeAnswer says what a service has answered.
func describeAnswer(b []byte) string {
	return fmt.Sprintf("it answers with %d bytes: %q", len(b), b[:min(len(b), 64)])
}

// A datagramAsker asks a gateway by extended CONNECT: an h2.Dialer or an h3.Dialer.
type datagramAsker interface {
	io.Closer
	Open(ctx context.Context, list *connect.HeaderList) (_ net.Conn, answer connect.Fields, err error)
}

// connectUDP asks the gateway for datagrams to a service, says something, and waits for
// what the service says.
func (p *prober) connectUDP(ctx context.Context) error {
	var asker datagramAsker = &h3.Dialer{Proxy: p.gateway(), TLS: p.secure(), Authorization: p.credentials()}
	step := "udp + connect-udp"
	if p.gateway() != p.o.via {
		asker, step = &h2.Dialer{Proxy: p.gateway(), TLS: p.secure(), Authorization: p.credentials()}, "tcp + connect-udp"
	}
	defer asker.Close()
	var conn tunnel.DatagramConn
	if err := p.step(step, func() (string, error) {
		c, err := (&connectudp.Dialer{Proxy: p.gateway(), Open: asker.Open}).DialContext(ctx, "udp", net.JoinHostPort(p.tls.ServerName, strconv.Itoa(p.port)))
		if err != nil {
			return "", err
		}
		conn = c.(tunnel.DatagramConn)
		return fmt.Sprintf("the gateway accepted: %d bytes go there", len(p.send)), nil
	}); err != nil {
		p.refusedByProxy(err)
		return err
	}
	err := p.step(serviceStep, func() (string, error) { return p.askDatagrams(ctx, conn) })
	if err != nil {
		p.report.Refusal = &probeRefusal{
			Answer: err.Error(),
			Hint:   "the gateway takes datagrams for the service, which may be down, or may not answer one that it cannot parse",
		}
	}
	return err
}

// askDatagrams sends what the service is asked, again where that may be lost, and returns
// what comes. It closes conn.
func (p *prober) askDatagrams(ctx context.Context, conn tunnel.DatagramConn) (string, error) {
	answers, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		var err error
		defer func() {
			if v := recover(); v != nil {
				err = tunnel.Caught(v)
			}
			ended <- err
		}()
		err = conn.ReceiveDatagrams(func(b []byte) {
			select {
			case answers <- describeAnswer(b):
			default:
			}
		})
	}()
	defer func() {
		_ = conn.Close()
		<-ended
	}()
	retry := time.NewTicker(again)
	defer retry.Stop()
	for {
		if err := conn.SendDatagram(p.send); err != nil {
			return "", err
		}
		select {
		case answer := <-answers:
			return answer, nil
		case err := <-ended:
			ended <- err // for the end
			select {
			case answer := <-answers:
				return answer, nil
			default:
				return "", fmt.Errorf("the gateway ended the tunnel: %w", err)
			}
		case <-ctx.Done():
			return "", errors.New("no answer")
		case <-retry.C:
		}
	}
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
