package names

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/dns"
	"culvert.dev/registry"
)

// told is a source that says what it is told to say.
type told chan registry.Update

func (s told) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case u := <-s:
			updates <- u
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// While a source has yet to speak, what the others said is answered, and of
// nothing is it said that it does not exist.
func TestAnswerBeforeEverySourceHasSpoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &Source{Registry: &registry.Registry{}}
		api := told(make(chan registry.Update))
		services := []*registry.Service{
			{Name: "web", Names: pattern("web.mesh.internal"), Ports: []uint16{443}, Exposed: true, Endpoints: []registry.Endpoint{ep("10.1.5.1:443")},
				NamedPorts: []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}}},
			{Name: "secret", Names: pattern("secret.mesh.internal"), Exposed: true, ExposedTo: []string{"west"}, Endpoints: []registry.Endpoint{ep("10.1.7.1:443")}},
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- src.Registry.Run(ctx, registry.Static{Name: "file", Snapshot: registry.Snapshot{Services: services}}, api)
		}()
		defer func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}()
		known := []question{
			{"web.mesh.internal", dns.TypeA, "", "exists 0:10.1.5.1"},
			{"web.mesh.internal", dns.TypeTXT, "", "exists "},
			{"_https._tcp.web.mesh.internal", dns.TypeSRV, "", "exists 0 1 web.mesh.internal:443"},
			{"dns-version.clusterset.local", dns.TypeTXT, "", "exists 1.0.0"},
		}
		api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
		synctest.Wait()
		ask(t, src, known)
		ask(t, src, []question{
			{"nobody.mesh.internal", dns.TypeA, "", "unknown "},
			{"secret.mesh.internal", dns.TypeA, "", "unknown "},
			{"mesh.internal", dns.TypeA, "", "unknown "},
			{"_http._tcp.web.mesh.internal", dns.TypeSRV, "", "unknown "},
			{"1.5.1.10.in-addr.arpa", dns.TypePTR, "", "unknown "},
			{`a\032b.mesh.internal`, dns.TypeA, "", "unknown "},
		})

		// What it says is known before anything is said not to exist.
		more := []*registry.Service{{Name: "db", Names: pattern("db.mesh.internal"), Exposed: true, Endpoints: []registry.Endpoint{ep("10.1.5.2:443")}}}
		for i := range 100 {
			if i == 10 {
				api <- registry.Update{Source: "api", Snapshot: registry.Snapshot{Services: more}}
			}
			var a dns.Answer
			src.Names().Answer(dns.Question{Name: "db.mesh.internal", Type: dns.TypeA}, &a)
			if a.Status != dns.Unknown && a.Status != dns.Exists {
				t.Fatalf("step %d: %s", i, said(&a))
			}
			time.Sleep(5 * time.Millisecond)
		}
		synctest.Wait()
		ask(t, src, known)
		ask(t, src, []question{
			{"db.mesh.internal", dns.TypeA, "", "exists 0:10.1.5.2"},
			{"nobody.mesh.internal", dns.TypeA, "", "absent "},
			{"mesh.internal", dns.TypeA, "", "above "},
		})

		// One that is lost later has said what there was.
		api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
		synctest.Wait()
		ask(t, src, []question{{"nobody.mesh.internal", dns.TypeA, "", "absent "}})
	})
}

// A source that has nothing to say makes no table, and the names are whole all
// the same.
func TestAnswerAfterASourceWithoutNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &Source{Registry: &registry.Registry{}}
		api := told(make(chan registry.Update))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- src.Registry.Run(ctx, registry.Static{Name: "file"}, &brief{api}) }()
		defer func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}()
		api <- registry.Update{Source: "api", Err: errors.New("out of reach")}
		synctest.Wait()
		ask(t, src, []question{{"nobody.mesh.internal", dns.TypeA, "", "unknown "}})
		close(api)
		synctest.Wait()
		ask(t, src, []question{{"nobody.mesh.internal", dns.TypeA, "", "absent "}})
	})
}

// brief is a source that comes to an end.
type brief struct{ told }

func (s *brief) Run(ctx context.Context, updates chan<- registry.Update) error {
	for u := range s.told {
		updates <- u
	}
	return nil
}
