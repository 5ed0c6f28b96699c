//go:build !nospiffe

package spiffe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"culvert.dev/identity"
)

// Supported says whether this program has the Workload API.
const Supported = true

const (
	maxMessage = 4 << 20 // bytes of one message of the agent
	firstWait  = time.Second
	longest    = 30 * time.Second // between two attempts
)

// A Source keeps keys and trust of Store by a Workload API. Its fields are set before
// Run. It is safe for concurrent use.
type Source struct {
	Store  *identity.Store
	Socket string       // unix:///PATH or tcp://IP:PORT
	Log    *slog.Logger // nil discards

	firstWait, longest time.Duration    // for tests; 0 means the constants
	now                func() time.Time // for tests; nil means time.Now

	mu      sync.Mutex
	config  Config
	known   known
	applied map[string]string // fingerprint of what was set last, by kind and name
	streams [3]streamState
	logged  string // the problem that was logged last

	tokens tokens
}

// The streams of a Workload API, in the order of Source.streams.
const (
	x509SVIDs = iota
	x509Bundles
	jwtBundles
)

var streamNames = [3]string{"x509Svids", "x509Bundles", "jwtBundles"}

type streamState struct {
	updates uint64
	updated time.Time
	problem string // "" while there is none
}

// Configure says which keys and trust to keep, from now on. A name that is no longer
// among them keeps what it has, and is not touched again.
func (s *Source) Configure(c Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.config = c
	s.apply()
}

// Run follows the agent until ctx is done, and returns its error. One of the streams
// that fails leaves the others alone: each connects and waits by itself.
func (s *Source) Run(ctx context.Context) error {
	if err := CheckSocket(s.Socket); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range s.streams {
		wg.Add(1)
		go func() {
			defer wg.Done()
			s.follow(ctx, i)
		}()
	}
	<-ctx.Done()
	return ctx.Err()
}

// follow reads one stream, and begins it again when it ends. It waits a little more
// after each attempt, up to the longest wait; a stream that lasted longer than that
// begins anew with the first.
func (s *Source) follow(ctx context.Context, stream int) {
	first, most := s.firstWait, s.longest
	if first == 0 {
		first, most = firstWait, longest
	}
	wait := first
	for ctx.Err() == nil {
		begun := time.Now()
		err := s.read(ctx, stream)
		if ctx.Err() != nil {
			return
		}
		if time.Since(begun) > most {
			wait = first
		}
		pause := wait/2 + rand.N(wait/2+1)
		s.failed(stream, err, pause)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		wait = min(2*wait, most)
	}
}

// read reads one stream until it ends. A panic by what the agent sends is its error.
func (s *Source) read(ctx context.Context, stream int) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return s.call(ctx, func(ctx context.Context, api workload.SpiffeWorkloadAPIClient) error {
		switch stream {
		case x509SVIDs:
			in, err := api.FetchX509SVID(ctx, &workload.X509SVIDRequest{})
			return receive(s, stream, in, err, s.useSVIDs)
		case x509Bundles:
			in, err := api.FetchX509Bundles(ctx, &workload.X509BundlesRequest{})
			return receive(s, stream, in, err, s.useX509Bundles)
		}
		in, err := api.FetchJWTBundles(ctx, &workload.JWTBundlesRequest{})
		return receive(s, stream, in, err, s.useJWTBundles)
	})
}

// receive has use called with each message of in, with s.mu held. What use returns are
// the parts of the message that it refused.
func receive[M any](s *Source, stream int, in grpc.ServerStreamingClient[M], err error, use func(*M) []error) error {
	if err != nil {
		return err
	}
	for {
		m, err := in.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("the agent ended the stream")
		}
		if err != nil {
			return err
		}
		func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			refused := use(m)
			s.apply()
			state := &s.streams[stream]
			state.updates++
			state.updated = time.Now()
			state.problem = ""
			if len(refused) > 0 {
				state.problem = "refused a part of the agent's answer: " + errors.Join(refused...).Error()
			}
			s.log(0)
		}()
	}
}

// call calls f with a connection of its own. So a connection that gRPC holds back, as
// it failed before, delays nothing.
func (s *Source) call(ctx context.Context, f func(context.Context, workload.SpiffeWorkloadAPIClient) error) error {
	to, err := target(s.Socket)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient(to,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the socket's permissions are the protection
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithNoProxy())
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(ctx, "workload.spiffe.io", "true"))
	defer cancel()
	return f(ctx, workload.NewSpiffeWorkloadAPIClient(conn))
}

// describe says in plain words why a call failed.
func describe(err error) string {
	st, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	message := st.Message()
	if len(message) > 512 {
		message = message[:512]
	}
	switch st.Code() {
	case codes.PermissionDenied:
		return "the agent has no identity for this process, register it: " + message
	case codes.Unimplemented:
		return "the agent does not have this call: " + message
	case codes.ResourceExhausted:
		return "the agent's answer is too large or the agent is busy: " + message
	case codes.Unavailable:
		return "cannot reach the agent: " + message
	}
	return "the agent answered " + st.Code().String() + ": " + message
}

func (s *Source) failed(stream int, err error, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams[stream].problem = describe(err)
	s.log(pause)
}

// log logs a change of how the agent is, and nothing while that lasts. It is called with
// s.mu held.
func (s *Source) log(pause time.Duration) {
	var problems []string
	waiting := false
	for _, state := range s.streams {
		if state.problem != "" && !slices.Contains(problems, state.problem) {
			problems = append(problems, state.problem)
		}
		waiting = waiting || state.problem == "" && state.updates == 0
	}
	now := strings.Join(problems, "; ")
	if now == "" {
		if waiting {
			return
		}
		now = "none"
	}
	if now == s.logged {
		return
	}
	s.logged = now
	switch {
	case s.Log == nil:
	case now == "none":
		s.Log.Info("Workload API answers", "socket", s.Socket)
	default:
		s.Log.Warn("Workload API has a problem; keeping the last keys and bundles", "socket", s.Socket, "err", now, "retry_in", pause.Round(time.Millisecond))
	}
}

// Status says how the agent is, and what it has given.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Status{Socket: s.Socket, Bundles: s.known.domains()}
	for i, state := range s.streams {
		out.Streams = append(out.Streams, Stream{Name: streamNames[i], Updates: state.updates, Updated: state.updated, Problem: state.problem})
	}
	for _, v := range s.known.svids {
		out.SVIDs = append(out.SVIDs, SVID{ID: v.id, Expires: v.cert.Leaf.NotAfter})
	}
	return out
}

func (s *Source) time() time.Time {
	if s.now != nil {
		return s.now()
	}
	return time.Now()
}
