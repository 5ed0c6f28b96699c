package mcs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// A locator is what the own cluster's addresses come from.
type locator struct {
	mu      sync.Mutex // guards the following
	address map[Name]Address
	told    map[Name]Imported
}

func (l *locator) set(name Name, a Address) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.address = map[Name]Address{name: a}
}

func (l *locator) imports() (all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range sorted(l.told) {
		all = append(all, fmt.Sprintf("%s%v", name, l.told[name].ClusterIPs))
	}
	return all
}

func (l *locator) use(c *Controller) {
	c.OnImports = func(all map[Name]Imported) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.told = maps.Clone(all)
	}
	c.Address = func(name Name) (Address, bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		a, known := l.address[name]
		return a, known
	}
}

func TestImportsOfTheOwnClusterHaveItsAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorldOf(t, "west"), &locator{}
		l.use(w.c)
		w.locked(func() { w.vips = []netip.Addr{netip.MustParseAddr("240.0.0.7")} })
		east, west := newSite(t), newSite(t)
		east.export(web, 0)
		w.add("east", east)
		w.add("west", west)
		w.settle()
		want(t, "before it is known", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[] east Pending")
		want(t, "elsewhere", strings.Join(east.imports(), "; "), "shop/web ClusterSetIP[240.0.0.7] east Ready")
		want(t, "told", strings.Join(l.imports(), "; "), "shop/web[]")

		l.set(web, Address{Service: "culvert-system/imported-web", IPs: []netip.Addr{netip.MustParseAddr("10.96.0.9"), netip.MustParseAddr("fd00::9")}})
		w.c.Changed()
		w.settle()
		want(t, "with a Service", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[10.96.0.9 fd00::9] east Ready")
		want(t, "elsewhere", strings.Join(east.imports(), "; "), "shop/web ClusterSetIP[240.0.0.7] east Ready")
		want(t, "told", strings.Join(l.imports(), "; "), "shop/web[10.96.0.9 fd00::9]")

		// A process that has just started does not know yet.
		l.set(Name{}, Address{})
		w.c.Changed()
		w.settle()
		want(t, "while it is not known", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[10.96.0.9 fd00::9] east Ready")

		l.set(web, Address{Why: "no port is free"})
		w.c.Changed()
		w.settle()
		want(t, "without a Service", strings.Join(west.imports(), "; "), "shop/web ClusterSetIP[240.0.0.7] east Ready")
		want(t, "told", strings.Join(l.imports(), "; "), "shop/web[]")
		w.locked(func() { w.vips = nil })
		w.c.Changed()
		w.settle()
		i, err := west.api.MulticlusterV1beta1().ServiceImports("shop").Get(context.Background(), "web", metav1.GetOptions{})
		west.must(err)
		if text := i.Status.Conditions[0].Message; !strings.HasSuffix(text, ": no port is free") {
			t.Errorf("condition %q does not say why", text)
		}
	})
}

func TestImportsOfOthersAndHeadlessOnesAreNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorldOf(t, "west"), &locator{}
		l.use(w.c)
		west := newSite(t)
		west.export(Name{Namespace: "shop", Name: "headless"}, 0, func(s *corev1.Service) { s.Spec.ClusterIP = "None" })
		west.must(west.api.Tracker().Add(&mcsv1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "foreign"}, Spec: mcsv1.ServiceImportSpec{Type: mcsv1.ClusterSetIP},
		}))
		w.add("west", west)
		w.settle()
		want(t, "imports", len(west.imports()), 2)
		want(t, "told", strings.Join(l.imports(), "; "), "")
	})
}

// A cluster without the namespace has no import, and nothing is told.
func TestImportsNeedTheirNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, l := newWorldOf(t, "west"), &locator{}
		l.use(w.c)
		east, west := newSite(t), newSite(t)
		east.export(web, 0)
		west.setFail(func(verb, resource string) error {
			if verb == "create" && resource == "serviceimports" {
				return apierrors.NewNotFound(corev1.Resource("namespaces"), "shop")
			}
			return nil
		})
		w.add("east", east)
		w.add("west", west)
		w.settle()
		want(t, "told", strings.Join(l.imports(), "; "), "")
	})
}
