package invitation

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

const (
	// Timeout is how long a conversation may take.
	Timeout = 15 * time.Second

	maxMessage   = 2 << 20 // bytes of a request or an answer: a bundle has at most 1 MiB
	maxAttempts  = 16      // at once
	failurePause = time.Second
)

// A Server serves the streams on which tokens are used: one attempt of a client at a time, and a few
// of all clients. The zero value is ready for use.
type Server struct {
	// Pause is how long a wrong request waits for its answer; 0 means a second.
	Pause time.Duration

	mu      sync.Mutex // guards running
	running map[netip.Prefix]bool
}

// Serve serves the stream of req: answer reads what comes from it and returns the one message
// that is sent, and whether the request was wrong. Requests that do not come by TLS 1.3 that
// this gateway ends, and attempts beyond the limits, are refused. It returns when the stream
// is closed. who is the name of the calling package, for errors.
func (s *Server) Serve(ctx context.Context, req *tunnel.Request, refuse func(error), who string, answer func(r *bufio.Reader) (v any, wrong bool)) {
	if req.TLS == nil || req.TLS.Version < tls.VersionTLS13 || req.TLS.Exporter == nil {
		refuse(tunnel.Refusef(tunnel.Denied, "%s: tokens are used by TLS 1.3, which this gateway ends", who))
		return
	}
	end, ok := s.begin(req.Source.Addr())
	if !ok {
		refuse(tunnel.Refusef(tunnel.Overload, "%s: another attempt of this client is under way, or there are too many", who))
		return
	}
	defer end()
	c, err := req.Accept()
	if err != nil {
		return
	}
	defer c.Close()
	stop := time.AfterFunc(Timeout, func() { _ = c.Close() })
	defer stop.Stop()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	v, wrong := answer(bufio.NewReaderSize(c, 4<<10))
	if wrong {
		pause := time.NewTimer(cmp.Or(s.Pause, failurePause))
		defer pause.Stop()
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
	}
	line, _ := json.Marshal(v)
	_, _ = c.Write(append(line, '\n'))
	_ = c.CloseWrite()
}

// begin begins an attempt of a client.
func (s *Server) begin(from netip.Addr) (end func(), ok bool) {
	bits := 32
	if from = from.Unmap(); from.Is6() {
		bits = 64
	}
	key, _ := from.Prefix(bits)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[key] || len(s.running) >= maxAttempts {
		return nil, false
	}
	if s.running == nil {
		s.running = map[netip.Prefix]bool{}
	}
	s.running[key] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.running, key)
	}, true
}

// ReadMessage reads a line of JSON into v, and returns it.
func ReadMessage(r *bufio.Reader, v any) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxMessage {
			return nil, fmt.Errorf("a message is longer than the limit of %d bytes", maxMessage)
		}
		line = append(line, part...)
		if err == nil {
			break
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, fmt.Errorf("no message has come: %w", err)
		}
	}
	if json.Unmarshal(line, v) != nil {
		return nil, errors.New("the line is not a message")
	}
	return line, nil
}
