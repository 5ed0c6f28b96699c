package command

import (
	"context"
	"log/slog"
	"reflect"
	"slices"
	"sync/atomic"

	"culvert.dev/internal/gateway"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
)

// A reloader has a running gateway follow its file. Its methods are called by the
// goroutine of the source.
type reloader struct {
	o        *gatewayOptions
	log      *slog.Logger
	output   *logOutput   // of log; nil where its level and format stay
	ids      *identities  // nil where they stay
	own      *credentials // nil where they stay
	capture  *agentCapture
	resolver *hostDNS    // of this host; nil where it stays as it is
	asked    atomic.Bool // for a reload, by a signal

	g       *gateway.Gateway
	read    func(path string, current *file.Config) (*file.Config, error)
	states  *file.Config // whose state files are in use
	kube    *kubeSources
	sources func() *registry.Group // those of kube

	cfg  gateway.Config // in force
	dns  *file.DNS      // of cfg
	used bool           // a file was read since the start

	next        gateway.Config // of what load has returned last
	nextKube    *kubeReader    // of the same, where it differs from what is in force
	nextCapture *wantedCapture // of the same; nil where nothing is captured from the start
	differs     bool
}

// follow has g, which was started with c and cfg, follow src. When ctx is done it writes
// nothing to Kubernetes any more.
func (r *reloader) follow(ctx context.Context, g *gateway.Gateway, src *file.Source, c *file.Config, cfg gateway.Config) {
	states := *c
	r.g, r.states, r.cfg, r.dns, r.read = g, &states, cfg, c.DNS, src.Load
	r.sources = func() *registry.Group {
		group := r.kube.group(ctx, g)
		group.Sources = append(slices.Clone(group.Sources), g.Peers())
		return group
	}
	if r.read == nil {
		r.read = file.Reload
	}
	src.Load = r.load
	src.OnConfig = func(c *file.Config) *registry.Group {
		if r.resolver != nil {
			if err := r.resolver.use(ctx, c); err != nil {
				r.log.Error("cannot change the DNS of this host; it stays as it is", "error", err)
			}
		}
		return r.use(c)
	}
	src.OnError = func(error) { g.Reloaded(false) }
}

// load reads the file. One that the gateway cannot use is refused as a whole.
func (r *reloader) load(path string, current *file.Config) (*file.Config, error) {
	if r.asked.Swap(false) {
		defer notify(notifyReady)
	}
	c, err := r.read(path, current)
	if err != nil || c == current {
		return c, err
	}
	r.o.override(c)
	r.next = r.cfg
	if err := settings(c, &r.next); err != nil {
		return nil, unusableError{err}
	}
	r.nextCapture = r.capture.want(c)
	r.capture.answer(&r.next, r.nextCapture)
	if r.next.Memory, err = r.o.memoryLimit(c); err != nil {
		return nil, err
	}
	r.nextKube = nil
	if r.differs = r.kube.differs(c); r.differs {
		if r.nextKube, err = newKube(c, r.cfg.Sockets, r.log); err != nil {
			return nil, unusableError{err}
		}
	}
	return c, nil
}

// An unusableError is that of a file without a mistake that the gateway cannot use.
type unusableError struct{ error }

func (e unusableError) Unwrap() error { return e.error }

// Is makes it a registry.ErrInvalid.
func (e unusableError) Is(target error) bool { return target == registry.ErrInvalid }

// use has the gateway use c, which load has returned. It returns the sources of Kubernetes
// where they are new.
func (r *reloader) use(c *file.Config) (sources *registry.Group) {
	if r.differs {
		r.kube.use(c, r.nextKube)
	}
	if r.differs || !r.used {
		sources = r.sources()
	}
	if was, is := r.cfg.DNS, r.next.DNS; was != nil && is != nil && was.Server.Forward != nil && is.Server.Forward != nil &&
		reflect.DeepEqual(forwarding(r.dns), forwarding(c.DNS)) {
		is.Server.Forward = was.Server.Forward // with its cache
	}
	if r.own != nil { // before the table names them
		r.own.use(c.Credentials)
	}
	if err := r.g.Reconfigure(r.next); err != nil { // settings has found it right
		r.log.Error("cannot use the configuration", "err", err)
		return sources
	}
	r.cfg, r.dns = r.next, c.DNS
	r.capture.follow(r.nextCapture)
	if r.output != nil {
		r.output.use(r.o, c)
	}
	if r.ids != nil {
		if err := r.ids.use(c.Identity); err != nil {
			r.log.Error("cannot open the listener of the bundle endpoint; trying again", "err", err)
		}
	}
	r.g.UseCertificates(expiries(c))
	for _, warning := range c.Warnings {
		r.log.Warn("configuration warning", "warning", warning.Error())
	}
	waiting := r.states.RestartNeeded(c)
	if r.states.ServicePorts == nil || c.ServicePorts == nil {
		r.states.ServicePorts = c.ServicePorts
	}
	if r.states.VIPs == nil || c.VIPs == nil {
		r.states.VIPs = c.VIPs
	}
	r.g.RestartNeeded(pendingChanges(waiting))
	if len(waiting) > 0 {
		keys := make([]string, len(waiting))
		for i, w := range waiting {
			keys[i] = w.Key
		}
		r.log.Warn("some changes need a restart", "parts", keys)
	}
	if r.used {
		r.g.Reloaded(true)
	}
	r.used = true
	return sources
}

// pendingChanges are changes in the words of /status.
func pendingChanges(list []file.Change) []gateway.PendingChange {
	all := make([]gateway.PendingChange, len(list))
	for i, c := range list {
		all[i] = gateway.PendingChange{Key: c.Key, InForce: c.Was, Configured: c.Is}
	}
	return all
}
