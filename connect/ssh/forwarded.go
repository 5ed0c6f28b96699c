package ssh

import (
	"context"
	"errors"
	"net"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// Open implements reverse.Session: it opens a channel of the type forwarded-tcpip. If the client does
// not answer, the channel counts until the connection ends.
func (v *served) Open(ctx context.Context, req *tunnel.Request, reg *reverse.Registration) (net.Conn, error) {
	to, err := v.target(reg)
	if err != nil {
		return nil, err
	}
	from := req.Source
	to.Originator, to.OriginPort = "0.0.0.0", uint32(from.Port())
	if from.IsValid() {
		to.Originator = from.Addr().WithZone("").Unmap().String()
	}
	if err := v.begin(); err != nil {
		return nil, err
	}
	type opened struct {
		st  *forwardedStream
		err error
	}
	result := make(chan opened)
	go func() {
		defer v.s.running.Done()
		defer v.s.recovered()
		st, err := v.openChannel(to)
		select {
		case result <- opened{st, err}:
			return
		case <-v.s.over:
		case <-ctx.Done():
		}
		if st != nil {
			_ = st.Abort()
		}
	}()
	select {
	case o := <-result:
		if o.err != nil {
			return nil, o.err
		}
		return o.st, nil
	case <-v.s.over:
		return nil, reverse.ErrEnded
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// target returns the message that opens a channel for reg, without the originator.
func (v *served) target(reg *reverse.Registration) (*forwardedTCPIP, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range v.order {
		if k.name == reg.Name && (reg.Port == 0 || k.port == reg.Port) {
			return &forwardedTCPIP{Host: v.forwards[k].host, Port: uint32(k.port)}, nil
		}
	}
	return nil, tunnel.Refusef(tunnel.DialFailed, "ssh: the client no longer serves %q", reg.Name)
}

// begin counts a channel that is to be opened.
func (v *served) begin() error {
	if v.open.Add(1) > maxForwarded {
		v.open.Add(-1)
		return tunnel.Refusef(tunnel.Overload, "ssh: %d streams to the client are open, the limit", maxForwarded)
	}
	s := v.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.why != nil {
		v.open.Add(-1)
		return reverse.ErrEnded
	}
	s.channels++
	s.forwarded++
	s.running.Add(1) // of the caller's goroutine
	return nil
}

// ended ends the count of a channel of begin.
func (v *served) ended() {
	v.open.Add(-1)
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	v.s.forwarded--
}

// openChannel waits for the client.
func (v *served) openChannel(to *forwardedTCPIP) (*forwardedStream, error) {
	s := v.s
	ch, requests, err := s.ssh.OpenChannel("forwarded-tcpip", ssh.Marshal(to))
	if err != nil {
		v.ended()
		s.closed()
		if refused, ok := errors.AsType[*ssh.OpenChannelError](err); ok {
			return nil, tunnel.Refusef(tunnel.DialFailed, "ssh: the client does not reach its service: %q", tunnel.Clip(refused.Message))
		}
		return nil, reverse.ErrEnded
	}
	st := newStream(s, ch)
	st.backlog.since = s.conn.arrived.Load()
	s.mu.Lock()
	s.streams[st] = struct{}{}
	s.mu.Unlock()
	s.running.Go(func() { // which waits, as the caller is one of running
		defer s.recovered()
		defer v.ended()
		s.watch(st, requests)
	})
	return &forwardedStream{st, v}, nil
}

// A forwardedStream is a stream to the client that counts its bytes.
type forwardedStream struct {
	*stream
	v *served
}

// Read implements net.Conn.
func (st *forwardedStream) Read(b []byte) (int, error) {
	n, err := st.stream.Read(b)
	if n > 0 {
		st.v.in.Add(int64(n))
		st.v.moved.Store(mux.Clock())
	}
	return n, err
}

// Write implements net.Conn.
func (st *forwardedStream) Write(b []byte) (int, error) {
	n, err := st.stream.Write(b)
	if n > 0 {
		st.v.out.Add(int64(n))
		st.v.moved.Store(mux.Clock())
	}
	return n, err
}
