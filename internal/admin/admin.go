package admin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"slices"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// Limits of the admin port's connections.
const (
	headTime   = 5 * time.Second  // for a request's head
	idleTime   = 60 * time.Second // between requests
	answerTime = 60 * time.Second // for an answer; net/http/pprof adds a profile's own time
	askTime    = 10 * time.Second // for Explain, which may ask DNS
	stopTime   = 2 * time.Second  // for answers under way when Serve is told to stop
	maxHead    = 16 << 10         // bytes of a request's head
	briefTime  = 5 * time.Second  // for a whole request to a Brief port
	maxConns   = 32               // connections: about half of the descriptors that clients can't take
)

// Admin serves the admin port:
//
//	/         what there is
//	/healthz  200 as long as the process answers
//	/readyz   200, maybe with what is amiss, or 503 with the reason
//	/metrics  for Prometheus
//	/status   JSON
//	/explain  JSON: what would happen to a request
//	/resolve  JSON: what a name means, from each network
//	/registry JSON, a line for each service: what there is, and what changes
//	/tunnels  JSON: the open tunnels that fit a filter; see ParseTunnelFilter
//	/tunnels/ID
//	/sites/invite, /sites/join, /sites/remove, /sites/invite-device, /sites/remove-device
//	/devices  JSON: the devices that have joined
//	/refusals JSON: the recent refusals that fit a filter; see ParseRefusalFilter
//	/debug/pprof/
//
// The zero value serves the first three. Set the fields before Handler or
// Serve; the funcs are called by any number of goroutines.
//
// A DELETE of /tunnels/ID closes that tunnel, and one of /tunnels with a filter
// those that fit. That is for requests by a unix socket only, unless Control is
// set: the port has no passwords, so by TCP it would be anyone's on this host. So is a POST
// of /sites/WHAT, whose body is a form.
type Admin struct {
	Ready    func() (ok bool, why string)                                      // why may also say what is amiss though it is ready. nil means always ready
	Metrics  http.Handler                                                      // nil means no /metrics
	Status   func() any                                                        // what /status shows; nil means no /status
	Explain  func(ctx context.Context, q url.Values) (any, error)              // an error is the question's: 400. nil means no /explain
	Resolve  func(ctx context.Context, q url.Values) (any, error)              // likewise of /resolve
	Registry func(ctx context.Context, q url.Values) iter.Seq[any]             // the lines of /registry, until ctx is done; a nil one says that more will come later. nil means no /registry
	Pprof    bool                                                              // serve /debug/pprof/
	Tunnels  func() iter.Seq[tunnel.Live]                                      // in the order of their IDs; nil means no /tunnels
	Refusals *RefusalLog                                                       // nil means no /refusals
	Control  func() bool                                                       // whether tunnels may be closed by TCP, too; nil means no
	Sites    func(ctx context.Context, what string, q url.Values) (any, error) // what a POST of /sites/WHAT asks for; an error is the question's: 400. nil means no /sites
	Devices  func() any                                                        // those that have an identity of this gateway, for /devices; nil means none of that path
	Hosts    []string                                                          // names by which it is asked, besides IP addresses and localhost
	Brief    bool                                                              // one request a connection, within 5 s: for a port that anybody reaches
	Log      *slog.Logger                                                      // net/http's complaints, and what operators changed; nil discards

	Connectors func() any // the answer of /connectors, of reverse sessions; nil means no /connectors

	// CloseTunnels ends the open tunnels that match, asked in the order of
	// their IDs, and returns how many. nil means they can't be closed.
	CloseTunnels func(match func(*tunnel.Live) bool) int
}

// Handler returns the handler, for those who bring their own server. Requests
// other than GET and HEAD (and DELETE of tunnels), with a body, or meant for a host that is not this
// one get an error.
func (a *Admin) Handler() http.Handler {
	mux := http.NewServeMux()
	var shown []string
	show := func(path string, h http.HandlerFunc) {
		mux.HandleFunc(path, h)
		shown = append(shown, path)
	}
	show("/healthz", func(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, "ok") })
	show("/readyz", a.readyz)
	if a.Metrics != nil {
		show("/metrics", a.Metrics.ServeHTTP)
	}
	if a.Status != nil {
		show("/status", func(w http.ResponseWriter, _ *http.Request) { a.json(w, a.Status()) })
	}
	if a.Explain != nil {
		show("/explain", a.question(a.Explain))
	}
	if a.Resolve != nil {
		show("/resolve", a.question(a.Resolve))
	}
	if a.Connectors != nil {
		show("/connectors", func(w http.ResponseWriter, _ *http.Request) { a.json(w, a.Connectors()) })
	}
	if a.Devices != nil {
		show("/devices", func(w http.ResponseWriter, _ *http.Request) { a.json(w, a.Devices()) })
	}
	if a.Registry != nil {
		show("/registry", a.registry)
	}
	if a.Tunnels != nil {
		show("/tunnels", a.tunnels)
		mux.HandleFunc("/tunnels/{id}", a.tunnel)
	}
	if a.Sites != nil {
		mux.HandleFunc(sitesPath+"{what}", a.sites)
	}
	if a.Refusals != nil {
		show("/refusals", a.refusals)
	}
	if a.Pprof {
		// One by one: importing net/http/pprof also adds them to
		// http.DefaultServeMux, which nothing here serves.
		show("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	mux.HandleFunc("/{$}", func(w http.ResponseWriter, _ *http.Request) { index(w, shown) })
	return a.guard(mux)
}

// guard turns away what is no operator's request.
func (a *Admin) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		if r.ContentLength != 0 {
			// net/http would read the body before the next request, for as
			// long as it takes to come.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(headTime))
			w.Header().Set("Connection", "close")
		}
		switch {
		case !slices.Contains(strings.Split(a.methods(r), ", "), r.Method):
			w.Header().Set("Allow", a.methods(r))
			text(w, http.StatusMethodNotAllowed, "only "+a.methods(r))
		case r.ContentLength != 0 && r.Method != http.MethodPost:
			text(w, http.StatusBadRequest, "the request must not have a body")
		case !a.knownHost(r.Host):
			text(w, http.StatusMisdirectedRequest, "this is not "+clean(r.Host, maxField)+": ask by IP address or as localhost")
		case byAnotherPage(r):
			text(w, http.StatusForbidden, "asked by another site's page")
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// byAnotherPage reports whether a browser asks because a page of another origin
// told it to. Such a page can't read the answer, but could have profiles made
// all day. Links to the other paths stay good.
func byAnotherPage(r *http.Request) bool {
	site := r.Header.Get("Sec-Fetch-Site")
	if strings.HasPrefix(r.URL.Path, "/debug/pprof") {
		// A page at another port of this host is of the same site, and one in
		// a window that was opened is a document.
		return site != "" && site != "none" && site != "same-origin"
	}
	return site == "cross-site" && r.Header.Get("Sec-Fetch-Dest") != "document"
}

func (a *Admin) readyz(w http.ResponseWriter, _ *http.Request) {
	if a.Ready != nil {
		switch ok, why := a.Ready(); {
		case !ok:
			text(w, http.StatusServiceUnavailable, "not ready: "+clean(why, maxError))
			return
		case why != "":
			text(w, http.StatusOK, "ok, but "+clean(why, maxError))
			return
		}
	}
	text(w, http.StatusOK, "ok")
}

// question serves what ask answers.
func (a *Admin) question(ask func(context.Context, url.Values) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), askTime)
		defer cancel()
		q, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			text(w, http.StatusBadRequest, "query: "+clean(err.Error(), maxError))
			return
		}
		v, err := ask(ctx, q)
		if err != nil {
			text(w, http.StatusBadRequest, clean(err.Error(), maxError))
			return
		}
		a.json(w, v)
	}
}

// registry serves /registry: a line of JSON for each service, and with watch for
// each change, for as long as the client reads.
func (a *Admin) registry(w http.ResponseWriter, r *http.Request) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		text(w, http.StatusBadRequest, "query: "+clean(err.Error(), maxError))
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	control := http.NewResponseController(w)
	out := bufio.NewWriterSize(w, 64<<10)
	var line bytes.Buffer
	for v := range a.Registry(r.Context(), q) {
		if v == nil {
			_ = control.SetWriteDeadline(time.Now().Add(answerTime))
			if out.Flush() != nil || control.Flush() != nil {
				return
			}
			continue
		}
		line.Reset()
		if err := json.NewEncoder(&line).Encode(v); err != nil {
			a.log().Error("cannot encode the response", "err", err)
			return
		}
		if _, err := out.Write(asciiJSON(line.Bytes())); err != nil {
			return
		}
	}
	_ = out.Flush()
}

// json answers with v.
func (a *Admin) json(w http.ResponseWriter, v any) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		a.log().Error("cannot encode the response", "err", err)
		text(w, http.StatusInternalServerError, "the response cannot be encoded; the log says why")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(asciiJSON(b.Bytes()))
}

func text(w http.ResponseWriter, status int, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = fmt.Fprintln(w, s)
}

func index(w http.ResponseWriter, paths []string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = fmt.Fprint(w, "<!doctype html>\n<title>culvert</title>\n<h1>culvert</h1>\n<ul>\n")
	for _, p := range paths {
		_, _ = fmt.Fprintf(w, "<li><a href=\"%s\">%s</a>\n", p, p)
	}
	_, _ = fmt.Fprint(w, "</ul>\n")
}

// Serve serves the admin port on ln, which it closes, until ctx ends. Answers
// under way then get two seconds. It returns nil after that, and an error only
// where accepting fails for good.
func (a *Admin) Serve(ctx context.Context, ln net.Listener) error {
	// The answers under way outlive ctx for a moment.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	srv := &http.Server{
		Handler:           a.Handler(),
		ReadHeaderTimeout: headTime,
		// No ReadTimeout: it would end the context of a long profile.
		WriteTimeout:                 answerTime,
		IdleTimeout:                  idleTime,
		MaxHeaderBytes:               maxHead - 4<<10, // net/http allows 4 KiB more than it is told
		DisableGeneralOptionsHandler: true,            // it would answer OPTIONS * before the Handler sees it
		BaseContext:                  func(net.Listener) context.Context { return work },
		ErrorLog:                     slog.NewLogLogger(a.log().Handler(), slog.LevelWarn),
		ConnState:                    newCrowd(maxConns).observe,
	}
	if a.Brief {
		srv.ReadTimeout = briefTime
		srv.SetKeepAlivesEnabled(false)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		_ = srv.Close()
		return fmt.Errorf("admin port %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	soon, cancel := context.WithTimeout(work, stopTime)
	defer cancel()
	if srv.Shutdown(soon) != nil {
		stop()
		_ = srv.Close()
	}
	<-served
	return nil
}

func (a *Admin) log() *slog.Logger {
	if a.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return a.Log
}
