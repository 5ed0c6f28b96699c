package connectudp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A pipeStream is one end of a stream in memory, of which a Write waits for the reader.
type pipeStream struct {
	net.Conn // nil: nothing else is called
	r        *io.PipeReader
	w        *io.PipeWriter
}

func newPipe() (a, b *pipeStream) {
	r1, w1 := io.Pipe()
	r2, w2 := io.Pipe()
	return &pipeStream{r: r1, w: w2}, &pipeStream{r: r2, w: w1}
}

func (s *pipeStream) Read(p []byte) (int, error)  { return s.r.Read(p) }
func (s *pipeStream) Write(p []byte) (int, error) { return s.w.Write(p) }
func (s *pipeStream) CloseWrite() error           { return s.w.Close() }

func (s *pipeStream) Close() error {
	_ = s.r.CloseWithError(net.ErrClosed)
	return s.w.Close()
}

func (s *pipeStream) Abort() error {
	_ = s.r.CloseWithError(syscall.ECONNRESET)
	return s.w.CloseWithError(syscall.ECONNRESET)
}

// A scriptedService is the connection to a service: a DatagramConn that a test drives.
type scriptedService struct {
	net.Conn // nil: nothing else is called
	ready    chan struct{}
	deliver  func([]byte)
	ended    chan error
	once     sync.Once

	mu  sync.Mutex // guards got
	got [][]byte
}

func newScriptedService() *scriptedService {
	return &scriptedService{ready: make(chan struct{}), ended: make(chan error, 1)}
}

func (s *scriptedService) SendDatagram(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, bytes.Clone(b))
	return nil
}

func (s *scriptedService) ReceiveDatagrams(deliver func([]byte)) error {
	s.deliver = deliver
	close(s.ready)
	return <-s.ended
}

func (s *scriptedService) end(err error) { s.once.Do(func() { s.ended <- err }) }

func (s *scriptedService) Close() error {
	s.end(net.ErrClosed)
	return nil
}

// DialContext and DialEndpoint implement tunnel.EndpointDialer.
func (s *scriptedService) DialContext(context.Context, string, string) (net.Conn, error) {
	return s, nil
}

func (s *scriptedService) DialEndpoint(context.Context, tunnel.Endpoint) (net.Conn, error) {
	return s, nil
}

// FuzzTunnelStates: whatever a client and a service do in turn, and whenever an operator
// ends the tunnel, the service gets the datagrams that the client has sent, the tunnel
// ends once, and nothing is left of it.
func FuzzTunnelStates(f *testing.F) {
	testnet.FuzzStates(f, func(t *testing.T, input []byte) {
		var record tunneltest.Record
		relay, service := &tunnel.Relay{}, newScriptedService()
		router := &tunnel.Router{Relay: relay, Resolver: tunneltest.Table{"dns.test:53": "192.0.2.1:53"}, Observe: record.Observe}
		near, far := newPipe()
		budget := &tunnel.Budget{Backlogs: 1 << 30}
		var work sync.WaitGroup
		work.Go(func() {
			router.ServeTunnel(t.Context(), &tunnel.Request{
				Proto: protocolName, Name: tunnel.MustParseName("dns.test"), Port: 53, Source: netip.MustParseAddrPort("192.0.2.9:1"), Datagrams: service,
				Accept: func() (tunnel.Stream, error) { return newConn(far, nil, budget), nil },
				Refuse: func(err error) { t.Errorf("refused: %v", err) },
			})
		})
		<-service.ready
		var sent []byte // what the client has written, until it closed
		open := true
		write := func(b []byte) {
			if open {
				n, _ := near.Write(b)
				sent = append(sent, b[:n]...)
			}
		}
		testnet.EachOperation(t, input, func(op, a, b byte) {
			switch op % 10 {
			case 0, 1:
				write(appendCapsule(nil, testnet.Pattern(int(a), int(b)*20)))
			case 2:
				write([]byte{a})
			case 3:
				write(appendNumber([]byte{a}, uint64(b)<<uint(a%50)))
			case 4:
				service.deliver(testnet.Pattern(int(a), int(b)*250))
			case 5: // the client reads some
				work.Go(func() { _, _ = near.Read(make([]byte, int(a)*100)) })
			case 6:
				_ = testnet.Pick(a, near.CloseWrite, near.Close, near.Abort)()
				open = false
			case 7:
				service.end(testnet.Pick[error](a, io.EOF, syscall.ECONNREFUSED, errors.New("broken")))
			case 8:
				for l := range relay.List() {
					relay.End(l.ID, tunnel.Killed)
				}
			case 9:
				time.Sleep(time.Duration(a) * time.Second)
			}
			synctest.Wait()
		})
		_ = near.Abort()
		work.Wait()
		synctest.Wait()
		outcomes := record.Outcomes()
		if len(outcomes) != 1 || outcomes[0].Reason == tunnel.Internal || relay.Open() != 0 || budget.Buffered() != 0 {
			t.Fatalf("%d outcomes, the first %+v, %d tunnels, %d bytes are counted", len(outcomes), outcomes[0], relay.Open(), budget.Buffered())
		}
		want, _ := reference(sent)
		for i, got := range service.got {
			if i >= len(want) || string(got) != want[i] {
				t.Fatalf("datagram %d of %d has %d bytes, and is none that was sent", i, len(service.got), len(got))
			}
		}
		if outcomes[0].Reason == tunnel.Done && outcomes[0].Err == nil && open && len(service.got) < len(want) {
			t.Fatalf("the service got %d datagrams of %d", len(service.got), len(want))
		}
	})
}
