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

// A Plain is a QUIC connection without HTTP: what a service and its client
// have between them where a gateway passes QUIC on by its name. It is for who
// wants to see such a service, and is no carrier.
type Plain struct{ conn *quic.Conn }

// maxPlain is how long a question or an answer may be.
const maxPlain = 64 << 10 // bytes

// DialPlain shakes hands with whoever answers at addr, "host:port": cfg has the
// name and the application protocols to ask for. The caller closes what it
// returns. What was refused with an alert is a tls.AlertError.
func DialPlain(ctx context.Context, addr string, cfg *tls.Config) (*Plain, error) {
	conn, err := quic.DialAddr(ctx, addr, cfg, &quic.Config{Allow0RTT: false})
	if err != nil {
		return nil, plainError(err)
	}
	return &Plain{conn}, nil
}

// State is what was agreed on, and who is there.
func (p *Plain) State() tls.ConnectionState { return p.conn.ConnectionState().TLS }

// Accepted waits for what the other side thinks of our certificate. A server
// has time to say so only after its client is done: it is nil where nothing was
// said within d.
func (p *Plain) Accepted(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.conn.Context().Done():
		return plainError(context.Cause(p.conn.Context()))
	case <-timer.C:
		return nil
	}
}

// Ask sends question and its end on a stream of its own, and returns all that
// comes back, 64 KiB at the most.
func (p *Plain) Ask(ctx context.Context, question []byte) ([]byte, error) {
	s, err := p.conn.OpenStreamSync(ctx)
	if err != nil {
		return nil, plainError(err)
	}
	defer s.CancelRead(0)
	defer context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Unix(1, 0)) })()
	if _, err = s.Write(question); err == nil {
		err = s.Close()
	}
	if err != nil {
		return nil, plainError(err)
	}
	answer, err := io.ReadAll(io.LimitReader(s, maxPlain))
	return answer, plainError(err)
}

// Close ends the connection at once.
func (p *Plain) Close() error { return p.conn.CloseWithError(0, "") }

// plainError has the alert that is in err, of the other side: RFC 9001 section
// 4.8.
func plainError(err error) error {
	if te := (*quic.TransportError)(nil); errors.As(err, &te) && te.Remote && te.ErrorCode.IsCryptoError() {
		return fmt.Errorf("%w: %w", err, tls.AlertError(te.ErrorCode-0x100))
	}
	return err
}

// ServePlain takes QUIC connections at pc, which stays the caller's, until ctx
// is done: what comes on a stream, 64 KiB at the most, goes to answer with who
// asks, and what it returns goes back.
func ServePlain(ctx context.Context, pc net.PacketConn, cfg *tls.Config, answer func(who *tls.ConnectionState, question []byte) []byte) error {
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
			who := conn.ConnectionState().TLS
			for {
				s, err := conn.AcceptStream(ctx)
				if err != nil {
					return
				}
				if question, err := io.ReadAll(io.LimitReader(s, maxPlain)); err == nil {
					_, _ = s.Write(answer(&who, question))
				}
				_ = s.Close()
			}
		})
	}
}
