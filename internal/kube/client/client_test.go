package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
)

func TestMain(m *testing.M) {
	if token := os.Getenv(pluginToken); token != "" {
		runPlugin(token)
		return
	}
	testnet.GoroutinesEnd(m)
}

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
		{"no pod", Config{}, "", "not in a pod"},
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
		{"unauthorized", apierrors.NewUnauthorized("who are you"), "may not list tlsroutes.gateway.networking.k8s.io: the API server does not recognize the credentials: who are you"},
		{"no CRD", apierrors.NewGenericServerResponse(404, "list", res, "", "", 0, true), "can't list tlsroutes.gateway.networking.k8s.io: the API server has no such resource; is its CRD installed?"},
		{"no object", apierrors.NewNotFound(res, "web"), ""},
		{"other", io.EOF, ""},
	} {
		if got, ok := Denied("list", res, tt.err); got != tt.want || ok != (tt.want != "") {
			t.Errorf("%s: got %q, %v, want %q", tt.name, got, ok, tt.want)
		}
	}
}

func TestDeniedSaysWhatWasAsked(t *testing.T) {
	accounts, routes := schema.GroupResource{Resource: "serviceaccounts"}, schema.GroupResource{Group: "gateway.networking.k8s.io", Resource: "tlsroutes"}
	err := fmt.Errorf("of a/edge: %w", Asked("get", accounts, apierrors.NewForbidden(accounts, "edge", errors.New("no right"))))
	got, ok := Denied("update", routes, err)
	if want := "may not get serviceaccounts: "; !ok || !strings.HasPrefix(got, want) {
		t.Errorf("got %q, %v, want %q", got, ok, want)
	}
	if got := Question(err); got != "get serviceaccounts" {
		t.Errorf("got question %q", got)
	}
	if !apierrors.IsForbidden(err) || Asked("get", accounts, nil) != nil || Question(io.EOF) != "" {
		t.Error("what was asked hides what was answered")
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

// A lease that is forbidden is said once by its verb, to the log and to who asks,
// and again when it may be had.
func TestLeaseSaysWhatIsDenied(t *testing.T) {
	for _, verb := range []string{"get", "create", "update"} {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				core := fake.NewClientset()
				if verb == "update" {
					old := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "culvert"}}
					if _, err := core.CoordinationV1().Leases("default").Create(t.Context(), old, metav1.CreateOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				var forbidden atomic.Bool
				forbidden.Store(true)
				leases := schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}
				core.PrependReactor(verb, "leases", func(ktesting.Action) (bool, runtime.Object, error) {
					return forbidden.Load(), nil, apierrors.NewForbidden(leases, "culvert", errors.New("no right"))
				})
				var log bytes.Buffer // the elector's goroutine alone writes to it while it runs
				var why atomic.Value
				var leads atomic.Bool
				ctx, cancel := context.WithCancel(t.Context())
				l := Lease{
					Client: core, Namespace: "default", Name: "culvert", Identity: "a", Log: slog.New(slog.NewTextHandler(&log, nil)),
					OnDenied: func(text string) { why.Store(text) },
				}
				done := make(chan error, 1)
				go func() {
					done <- l.Run(ctx, func(ctx context.Context) {
						leads.Store(true)
						<-ctx.Done()
					})
				}()
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				want := "may not " + verb + " leases.coordination.k8s.io: "
				if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), want) || !strings.Contains(log.String(), "lease=default/culvert") {
					t.Errorf("got %d warnings, want one with %q:\n%s", n, want, &log)
				}
				if got, _ := why.Load().(string); !strings.HasPrefix(got, want) || leads.Load() {
					t.Errorf("got %q, leading %v, want %q", got, leads.Load(), want)
				}
				forbidden.Store(false)
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := why.Load(); got != "" || !leads.Load() {
					t.Errorf("got %q, leading %v, once it is allowed", got, leads.Load())
				}
				cancel()
				<-done
			})
		})
	}
}

// Clocks of holders may differ by any time: who has the lease is told by when it
// was last seen to change, and not by what it says.
func TestLeaseAndClocksThatDiffer(t *testing.T) {
	for name, skew := range map[string]time.Duration{"an hour ahead": time.Hour, "an hour behind": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				core := fake.NewClientset()
				leases := core.CoordinationV1().Leases("default")
				renew := func() { // as one does whose clock is another
					now := metav1.NewMicroTime(time.Now().Add(skew))
					id, seconds := "other", int32(15)
					l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "culvert"}, Spec: coordinationv1.LeaseSpec{
						HolderIdentity: &id, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now,
					}}
					if _, err := leases.Update(t.Context(), l, metav1.UpdateOptions{}); apierrors.IsNotFound(err) {
						_, err = leases.Create(t.Context(), l, metav1.CreateOptions{})
						if err != nil {
							t.Error(err)
						}
					}
				}
				renew()
				var leads atomic.Bool
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				l := Lease{Client: core, Namespace: "default", Name: "culvert", Identity: "a", Log: slog.New(slog.DiscardHandler)}
				go func() {
					done <- l.Run(ctx, func(ctx context.Context) {
						leads.Store(true)
						<-ctx.Done()
					})
				}()
				for range 40 { // two minutes
					time.Sleep(3 * time.Second)
					if leads.Load() {
						t.Fatal("got two holders")
					}
					renew()
				}
				time.Sleep(time.Minute) // it renews no more
				if !leads.Load() {
					t.Error("got no holder, a minute after the other one's last word")
				}
				cancel()
				<-done
			})
		})
	}
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
