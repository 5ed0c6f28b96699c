package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const kubeconfig = `apiVersion: v1
kind: Config
clusters:
- name: east
  cluster: {server: "https://east.test:6443"}
- name: west
  cluster: {server: "https://west.test:6443"}
users:
- name: me
  user: {token: secret}
contexts:
- name: east
  context: {cluster: east, user: me}
- name: west
  context: {cluster: west, user: me}
current-context: east
`

func TestREST(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name       string
		cfg        Config
		host, fail string
	}{
		{"current context", Config{Kubeconfig: path}, "https://east.test:6443", ""},
		{"named context", Config{Kubeconfig: path, Context: "west"}, "https://west.test:6443", ""},
		{"unknown context", Config{Kubeconfig: path, Context: "north"}, "", `context "north"`},
		{"no file", Config{Kubeconfig: path + "x"}, "", "no such file"},
		{"no pod", Config{}, "", "this is no pod"},
		{"a context of no file", Config{Context: "west"}, "", "without a kubeconfig"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			got, err := tt.cfg.REST()
			if tt.fail != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fail) {
					t.Fatalf("got error %v, want one with %q", err, tt.fail)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Host != tt.host || got.QPS != QPS || got.Burst != Burst || !strings.HasPrefix(got.UserAgent, "culvert/dev (") {
				t.Errorf("got %s, QPS %v, burst %v, user agent %q, want %s", got.Host, got.QPS, got.Burst, got.UserAgent, tt.host)
			}
		})
	}
}

func TestDenied(t *testing.T) {
	res := schema.GroupResource{Group: "gateway.networking.k8s.io", Resource: "tlsroutes"}
	for _, tt := range []struct {
		name string
		err  error
		want string
	}{
		{"forbidden", fmt.Errorf("failed to list: %w", apierrors.NewForbidden(res, "", errors.New("user x\n has no right"))), "may not list tlsroutes.gateway.networking.k8s.io: tlsroutes.gateway.networking.k8s.io is forbidden: user x has no right"},
		{"unauthorized", apierrors.NewUnauthorized("who are you"), "may not list tlsroutes.gateway.networking.k8s.io: the API server does not know who asks: who are you"},
		{"no CRD", apierrors.NewGenericServerResponse(404, "list", res, "", "", 0, true), "can't list tlsroutes.gateway.networking.k8s.io: the API server has no such resource; is its CRD installed?"},
		{"no object", apierrors.NewNotFound(res, "web"), ""},
		{"other", io.EOF, ""},
	} {
		if got, ok := Denied("list", res, tt.err); got != tt.want || ok != (tt.want != "") {
			t.Errorf("%s: got %q, %v, want %q", tt.name, got, ok, tt.want)
		}
	}
}

type trip func() (*http.Response, error)

func (f trip) RoundTrip(*http.Request) (*http.Response, error) { return f() }

func TestPulse(t *testing.T) {
	var turns []string
	p := NewPulse()
	ask := func(ctx context.Context, status int, err error) {
		rt := p.Wrap(trip(func() (*http.Response, error) {
			if err != nil {
				return nil, err
			}
			return &http.Response{StatusCode: status, Status: fmt.Sprint(status)}, nil
		}))
		req, _ := http.NewRequestWithContext(ctx, "GET", "http://api/version", nil)
		turn, _ := p.State()
		_, _ = rt.RoundTrip(req)
		select {
		case <-turn:
			_, err := p.State()
			turns = append(turns, fmt.Sprint(err))
		default:
		}
	}
	ctx := t.Context()
	gone, cancel := context.WithCancel(ctx)
	cancel()

	ask(ctx, 200, nil)
	ask(ctx, 403, nil) // an answer all the same
	ask(gone, 0, context.Canceled)
	if _, err := p.State(); err != nil || turns != nil {
		t.Fatalf("got %v, %v after answers, want none", err, turns)
	}
	ask(ctx, 0, io.ErrUnexpectedEOF)
	ask(ctx, 0, io.ErrClosedPipe)
	if _, err := p.State(); err != io.ErrClosedPipe {
		t.Errorf("got %v, want the last error", err)
	}
	ask(ctx, 503, nil)
	ask(ctx, 404, nil)
	ask(ctx, 401, nil)
	ask(ctx, 200, nil)
	if want := []string{"unexpected EOF", "<nil>", "GET /version: 401", "<nil>"}; fmt.Sprint(turns) != fmt.Sprint(want) {
		t.Errorf("got turns %q, want %q", turns, want)
	}
}

func TestLeaseHasOneHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core := fake.NewClientset()
		holders := make(chan string, 10)
		run := func(ctx context.Context, id string) chan error {
			done := make(chan error, 1)
			l := Lease{Client: core, Namespace: "default", Name: "culvert", Identity: id, Log: slog.New(slog.DiscardHandler)}
			go func() {
				done <- l.Run(ctx, func(ctx context.Context) {
					holders <- id
					<-ctx.Done()
					holders <- "-" + id
				})
			}()
			return done
		}
		ctxA, stopA := context.WithCancel(t.Context())
		a := run(ctxA, "a")
		if got := <-holders; got != "a" {
			t.Fatalf("got %s first, want a", got)
		}
		ctxB, stopB := context.WithCancel(t.Context())
		b := run(ctxB, "b")
		time.Sleep(time.Minute) // of the bubble's clock
		if len(holders) != 0 {
			t.Fatalf("got a holder %s beside a", <-holders)
		}
		stopA()
		<-a
		for _, want := range []string{"-a", "b"} {
			if got := <-holders; got != want {
				t.Fatalf("got %s, want %s", got, want)
			}
		}
		stopB()
		<-b
	})
}

func TestOnce(t *testing.T) {
	var o Once
	for i, tt := range []struct {
		text string
		want bool
	}{{"a", true}, {"a", false}, {"b", true}, {"", false}, {"b", true}} {
		if got := o.New("x", tt.text); got != tt.want {
			t.Errorf("%d: %q: got %v, want %v", i, tt.text, got, tt.want)
		}
	}
}
