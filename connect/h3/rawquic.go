package h3

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
)

// A RawQUIC is a QUIC connection without HTTP: what a client and a service have
// between them where a gateway passes QUIC on by its name. It serves to probe such a
// service, and is no carrier.
type RawQUIC struct{ conn *quic.Conn }

// maxRawQUIC limits a question and an answer.
const maxRawQUIC = 64 << 10 // bytes

// DialRawQUIC connects to addr, "host:port": cfg has the name and the application
// protocols to ask for. The caller closes the connection. A handshake that the
// other side has refused with an alert is a tls.AlertError.
func DialRawQUIC(ctx context.Context, addr string, cfg *tls.Config) (*RawQUIC, error) {
	conn, err := quic.DialAddr(ctx, addr, cfg, &quic.Config{Allow0RTT: false})
	if err != nil {
		return nil, rawQUICError(err)
	}
	return &RawQUIC{conn}, nil
}

// State returns what the handshake has agreed on, and the peer's certificates.
func (p *RawQUIC) State() tls.ConnectionState { return p.conn.ConnectionState().TLS }

// Accepted waits for the other side to refuse our certificate. A server does so only
// after its client is done with the handshake: Accepted returns nil where no refusal
// came within d.
func (p *RawQUIC) Accepted(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.conn.Context().Done():
		return rawQUICError(context.Cause(p.conn.Context()))
	case <-timer.C:
		return nil
	}
}

// Ask sends question and its end on a stream of its own, and returns all that
// comes back, 64 KiB at the most.
func (p *RawQUIC) Ask(ctx context.Context, question []byte) ([]byte, error) {
	s, err := p.conn.OpenStreamSync(ctx)
	if err != nil {
		return nil, rawQUICError(err)
	}
	defer s.CancelRead(0)
	defer context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Unix(1, 0)) })()
	if _, err = s.Write(question); err == nil {
		err = s.Close()
	}
	if err != nil {
		return nil, rawQUICError(err)
	}
	answer, err := io.ReadAll(io.LimitReader(s, maxRawQUIC))
	return answer, rawQUICError(err)
}

// Close ends the connection at once.
func (p *RawQUIC) Close() error { return p.conn.CloseWithError(0, "") }

// rawQUICError adds to err the TLS alert of the other side that it carries, RFC 9001
// section 4.8.
func rawQUICError(err error) error {
	if te := (*quic.TransportError)(nil); errors.As(err, &te) && te.Remote && te.ErrorCode.IsCryptoError() {
		return fmt.Errorf("%w: %w", err, tls.AlertError(te.ErrorCode-0x100))
	}
	return err
}

// ServeRawQUIC serves QUIC connections at pc, which stays the caller's, until ctx is
// done. It calls answer with the bytes of each stream, 64 KiB at the most, and the
// state of its connection, and sends back the result.
func ServeRawQUIC(ctx context.Context, pc net.PacketConn, cfg *tls.Config, answer func(who *tls.ConnectionState, question []byte) []byte) error {
	tr := &quic.Transport{Conn: pc}
	defer tr.Close()
	ln, err := tr.Listen(cfg, &quic.Config{Allow0RTT: false})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, err := ln.Accept(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		wg.Go(func() {
			defer func() {
				if recover() != nil { // of answer: it costs one connection
					_ = conn.CloseWithError(quic.ApplicationErrorCode(InternalError), "")
				}
			}()
			defer context.AfterFunc(ctx, func() { _ = conn.CloseWithError(0, "") })()
			client := conn.ConnectionState().TLS
			for {
				s, err := conn.AcceptStream(ctx)
				if err != nil {
					return
				}
				if question, err := io.ReadAll(io.LimitReader(s, maxRawQUIC)); err == nil {
					_, _ = s.Write(answer(&client, question))
				}
				_ = s.Close()
			}
		})
	}
}
