package watch

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// A Cache is a Store that keeps the objects as they are. They must not be changed.
type Cache struct {
	objects cache.Store
	changed func(before, after metav1.Object)
}

// NewCache makes a Cache. changed, which may be nil, is called when an object was added (before is
// nil), changed, or is gone (after is nil); it must not block.
func NewCache(changed func(before, after metav1.Object)) *Cache {
	if changed == nil {
		changed = func(metav1.Object, metav1.Object) {}
	}
	return &Cache{objects: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: changed}
}

// Apply implements Store.
func (c *Cache) Apply(changed []any, gone []types.NamespacedName) {
	for _, o := range changed {
		after, ok := o.(metav1.Object)
		if !ok {
			continue
		}
		before := c.get(types.NamespacedName{Namespace: after.GetNamespace(), Name: after.GetName()})
		if before != nil && before.GetUID() == after.GetUID() && after.GetResourceVersion() != "" && before.GetResourceVersion() == after.GetResourceVersion() {
			continue // it was listed again
		}
		_ = c.objects.Update(o) // its key is its name
		c.changed(before, after)
	}
	for _, name := range gone {
		if before := c.get(name); before != nil {
			_ = c.objects.Delete(before)
			c.changed(before, nil)
		}
	}
}

func (c *Cache) get(name types.NamespacedName) metav1.Object {
	o, _ := c.Get(name).(metav1.Object)
	return o
}

// Get returns the object of a name, or nil.
func (c *Cache) Get(name types.NamespacedName) any {
	key := name.Name
	if name.Namespace != "" {
		key = name.Namespace + "/" + name.Name
	}
	o, ok, err := c.objects.GetByKey(key)
	if err != nil || !ok {
		return nil
	}
	return o
}

// All returns all objects, in no order.
func (c *Cache) All() []any { return c.objects.List() }
