package imported

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

var (
	web = Name{Namespace: "shop", Name: "web"}
	db  = Name{Namespace: "shop", Name: "db"}
)

// A world is an API server with a replica, for use in a bubble of synctest.
type world struct {
	t    *testing.T
	core *fake.Clientset
	s    *Source
	stop func()

	mu     sync.Mutex // guards the following
	log    bytes.Buffer
	leads  bool
	fail   func(verb string) error
	writes []string
	ips    int
	last   registry.Update
}

func (w *world) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(p)
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, core: fake.NewSimpleClientset(), leads: true}
	w.core.PrependReactor("*", "services", func(a ktesting.Action) (bool, runtime.Object, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.fail != nil {
			if err := w.fail(a.GetVerb()); err != nil {
				return true, nil, err
			}
		}
		switch a := a.(type) {
		case ktesting.CreateAction:
			svc := a.GetObject().(*corev1.Service)
			w.writes = append(w.writes, a.GetVerb()+" "+svc.Annotations[noteImport])
			if a.GetVerb() == "create" && len(svc.Spec.ClusterIPs) == 0 { // as the API server gives them
				w.ips++
				svc.Spec.ClusterIP = fmt.Sprintf("10.96.0.%d", w.ips)
				svc.Spec.ClusterIPs = []string{svc.Spec.ClusterIP, fmt.Sprintf("fd00::%d", w.ips)}
				svc.UID = "uid"
			}
		case ktesting.DeleteAction:
			w.writes = append(w.writes, "delete "+a.GetName())
		}
		return false, nil, nil
	})
	w.run()
	return w
}

// run starts a replica in place of the one that runs.
func (w *world) run() {
	if w.stop != nil {
		w.stop()
	}
	w.s = &Source{
		Client: w.core, Namespace: "culvert-system", Owner: "culvert", Selector: map[string]string{"app": "culvert"},
		Ports: registry.PortRange{First: 20000, Last: 20003},
		Leads: func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.leads },
		Log:   slog.New(slog.NewTextHandler(w, nil)),
	}
	ctx, cancel := context.WithCancel(context.Background())
	updates := make(chan registry.Update)
	var running sync.WaitGroup
	running.Go(func() { _ = w.s.Run(ctx, updates) })
	running.Go(func() {
		for {
			select {
			case u := <-updates:
				w.mu.Lock()
				w.last = u
				w.mu.Unlock()
			case <-ctx.Done():
				return
			}
		}
	})
	w.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	w.t.Cleanup(w.stop)
}

func (w *world) settle() {
	time.Sleep(3 * time.Second)
	synctest.Wait()
}

func (w *world) set(imports map[Name][]int32) {
	all := map[Name][]mcsv1.ServicePort{}
	for name, ports := range imports {
		all[name] = []mcsv1.ServicePort{{Name: "udp", Port: 53, Protocol: corev1.ProtocolUDP}}
		for _, p := range ports {
			all[name] = append(all[name], mcsv1.ServicePort{Name: fmt.Sprint("p", p), Port: p, Protocol: corev1.ProtocolTCP})
		}
	}
	w.s.SetImports(all)
	w.settle()
}

func (w *world) setFail(f func(verb string) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail = f
}

func (w *world) setLeads(leads bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leads = leads
}

func (w *world) logged() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := w.log.String()
	w.log.Reset()
	return text
}

func (w *world) written() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := strings.Join(w.writes, ", ")
	w.writes = nil
	return text
}

// listeners are the listeners of the last Update, "TARGET>NAME:PORT".
func (w *world) listeners() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, l := range w.last.Listeners {
		if l.Protocol != registry.Streams || l.Address.IsValid() {
			w.t.Errorf("listener %+v is not of streams at every address", l)
		}
		all = append(all, fmt.Sprintf("%s:%d", l.Settings.Service, l.Settings.Port))
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// targets are the target ports of all Services by import and port.
func (w *world) targets() map[string]int32 {
	w.t.Helper()
	l, err := w.core.CoreV1().Services("culvert-system").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	all := map[string]int32{}
	for _, svc := range l.Items {
		for _, p := range svc.Spec.Ports {
			all[fmt.Sprintf("%s:%d", svc.Annotations[noteImport], p.Port)] = p.TargetPort.IntVal
		}
	}
	return all
}

func (w *world) service(name Name) *corev1.Service {
	w.t.Helper()
	svc, err := w.core.CoreV1().Services("culvert-system").Get(context.Background(), w.s.serviceName(name), metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return svc
}

func (w *world) address(name Name) string {
	a, known := w.s.Address(name)
	if !known {
		return "not known"
	}
	return fmt.Sprintf("%v %s", a.IPs, a.Why)
}

func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func contains(t *testing.T, text, part string) {
	t.Helper()
	if !strings.Contains(text, part) {
		t.Errorf("%q is not in\n%s", part, text)
	}
}

func TestAnImportHasAServiceAndListeners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.settle()
		want(t, "before the imports are known", w.address(web), "not known")
		w.set(map[Name][]int32{web: {443, 80}, db: {}})
		want(t, "listeners", w.listeners(), "web.shop.svc.clusterset.local:443 web.shop.svc.clusterset.local:80")
		want(t, "address", w.address(web), "[10.96.0.1 fd00::1] ")
		want(t, "address without TCP", w.address(db), "[] it has no TCP port")
		svc := w.service(web)
		want(t, "selector", svc.Spec.Selector["app"], "culvert")
		want(t, "type", svc.Spec.Type, corev1.ServiceTypeClusterIP)
		want(t, "families", *svc.Spec.IPFamilyPolicy, corev1.IPFamilyPolicyPreferDualStack)
		want(t, "label", svc.Labels["app.kubernetes.io/managed-by"], "culvert")
		want(t, "ports", len(svc.Spec.Ports), 2)
		if !strings.HasPrefix(svc.Name, "imported-web-shop-") {
			t.Errorf("name %q", svc.Name)
		}
		want(t, "writes", w.written(), "create shop/web")
		time.Sleep(24 * time.Hour)
		want(t, "writes in a quiet day", w.written(), "")
	})
}

func TestNamesFitALabel(t *testing.T) {
	s := &Source{Owner: strings.Repeat("o", 200)}
	long := Name{Namespace: strings.Repeat("n", 63), Name: strings.Repeat("w", 63)}
	if name := s.serviceName(long); len(name) > 63 {
		t.Errorf("%q has %d bytes", name, len(name))
	}
	if owner := s.labels()[labelOwner]; len(owner) > 63 {
		t.Errorf("%q has %d bytes", owner, len(owner))
	}
	if s.serviceName(long) == s.serviceName(Name{Namespace: long.Namespace, Name: long.Name[:62]}) {
		t.Error("two imports have one name")
	}
}

func TestPortsThatChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(map[Name][]int32{web: {443, 80}})
		before := w.targets()
		w.set(map[Name][]int32{web: {443, 8080}})
		after := w.targets()
		want(t, "the port that stays", after["shop/web:443"], before["shop/web:443"])
		if after["shop/web:8080"] == before["shop/web:80"] {
			t.Error("the new port has the target port of the old one at once")
		}
		want(t, "listeners", w.listeners(), "web.shop.svc.clusterset.local:443 web.shop.svc.clusterset.local:8080")
		want(t, "ClusterIP", w.address(web), "[10.96.0.1 fd00::1] ")
	})
}

func TestAnImportThatVanishesKeepsItsPortForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(map[Name][]int32{web: {1, 2, 3}})
		before := w.targets()
		w.set(nil)
		// The last one of all is gone when the API server has confirmed it.
		time.Sleep(time.Minute)
		synctest.Wait()
		want(t, "Services", len(w.targets()), 0)
		want(t, "listeners", w.listeners(), "")
		w.set(map[Name][]int32{db: {5432, 5433}})
		for key, target := range w.targets() {
			for was, port := range before {
				if port == target {
					t.Errorf("%s has target port %d, that of %s", key, port, was)
				}
			}
		}
		want(t, "ports given", len(w.targets()), 1)
		contains(t, w.logged(), "make the range of kubernetes.importedServices larger")
		time.Sleep(15 * time.Minute)
		synctest.Wait()
		want(t, "ports given later", len(w.targets()), 2)
	})
}

func TestARangeThatIsExhausted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(map[Name][]int32{db: {1, 2, 3, 4}})
		w.set(map[Name][]int32{db: {1, 2, 3, 4}, web: {443}})
		want(t, "ports of the first", len(w.targets()), 4)
		contains(t, w.address(web), "no tcp port is free in 20000-20003")
		text := w.logged()
		contains(t, text, "imported service has no address in this cluster, or not all of its ports")
		time.Sleep(time.Hour)
		synctest.Wait()
		want(t, "said again", w.logged(), "")
	})
}

func TestAServiceOfAnotherOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		foreign := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "culvert-system", Name: w.s.serviceName(web)}}
		if err := w.core.Tracker().Add(foreign); err != nil {
			t.Fatal(err)
		}
		w.set(map[Name][]int32{web: {443}})
		contains(t, w.address(web), "is of another owner")
		contains(t, w.logged(), "delete or rename it")
		want(t, "it is left", len(w.service(web).Spec.Ports), 0)
		if err := w.core.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("services"), "culvert-system", foreign.Name); err != nil {
			t.Fatal(err)
		}
		time.Sleep(retryInterval)
		w.settle()
		contains(t, w.address(web), "[10.96.0.")
	})
}

func TestWithoutTheRightToWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.setFail(func(verb string) error {
			if verb == "create" {
				return apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("no"))
			}
			return nil
		})
		w.set(map[Name][]int32{web: {443}})
		contains(t, w.address(web), "may not create services")
		contains(t, w.logged(), "may not create services")
		time.Sleep(time.Hour)
		synctest.Wait()
		want(t, "said again", w.logged(), "")
		w.setFail(nil)
		time.Sleep(retryInterval)
		w.settle()
		want(t, "with the right", w.address(web), "[10.96.0.1 fd00::1] ")
	})
}

func TestWithoutTheRightToRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.setFail(func(string) error { return apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("no")) })
		w.run()
		w.set(map[Name][]int32{web: {443}})
		time.Sleep(time.Minute)
		synctest.Wait()
		contains(t, w.address(web), "may not list services")
		contains(t, w.logged(), "without=\"addresses of imported services\"")
		w.mu.Lock()
		defer w.mu.Unlock()
		want(t, "snapshot", w.last.Source, SourceName)
	})
}

func TestReplicasFollowTheOneThatLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(map[Name][]int32{web: {443}})
		before := w.targets()
		w.setLeads(false)
		w.run()
		w.set(map[Name][]int32{web: {443}, db: {5432}})
		want(t, "listeners of a replica that does not lead", w.listeners(), "web.shop.svc.clusterset.local:443")
		want(t, "writes of the first leader", w.written(), "create shop/web")
		w.setLeads(true)
		time.Sleep(retryInterval)
		w.settle()
		want(t, "writes of the next leader", w.written(), "create shop/db")
		want(t, "port", w.targets()["shop/web:443"], before["shop/web:443"])
		want(t, "listeners", w.listeners(), "db.shop.svc.clusterset.local:5432 web.shop.svc.clusterset.local:443")
	})
}

func TestAnAPIServerThatIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(map[Name][]int32{web: {443}})
		w.setFail(func(string) error { return syscall.ECONNREFUSED })
		w.set(map[Name][]int32{web: {443}, db: {5432}})
		want(t, "listeners", w.listeners(), "web.shop.svc.clusterset.local:443")
		contains(t, w.logged(), "create of Service culvert-system/imported-db-shop-")
		w.setFail(nil)
		time.Sleep(retryInterval)
		w.settle()
		want(t, "listeners afterwards", w.listeners(), "db.shop.svc.clusterset.local:5432 web.shop.svc.clusterset.local:443")
	})
}

func TestChangesByHandAreUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(map[Name][]int32{web: {443}, db: {5432}})
		before := w.targets()
		svc := w.service(web)
		svc.Spec.Ports[0].TargetPort = intstr.FromInt32(22)
		svc.Spec.Selector = map[string]string{"app": "other"}
		if _, err := w.core.CoreV1().Services("culvert-system").Update(context.Background(), svc, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		want(t, "selector", w.service(web).Spec.Selector["app"], "culvert")
		if got := w.targets()["shop/web:443"]; got < 20000 || got > 20003 || got == before["shop/db:5432"] {
			t.Errorf("target port %d", got)
		}
		if err := w.core.CoreV1().Services("culvert-system").Delete(context.Background(), svc.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		want(t, "it is made anew", len(w.targets()), 2)
	})
}
